"""Tracks live tensors that a failed restore has partly overwritten: they are neither trained on nor saved.

Bytes that fail their digest are removed from a live tensor again, but verified ones are useful only as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from holdfast_formats.errors import StateOverwritten

OVERWRITTEN = (
    "live tensors are partly overwritten, so training and saving are refused until a restore succeeds: restore "
    "another step, or stop; restore(prove_first=True) checks everything before it overwrites anything"
)


def unnoticed(size: int) -> None:
    """For bytes that are shown to no person."""


class Overwriting(NamedTuple):
    """How live tensors are overwritten. `begins` is called before their first byte changes. With `prove_first` everything is
    verified before that; otherwise each extent is verified by itself and read only once. `moved` gets the number of bytes
    that were just read and verified, from several threads.
    """

    begins: Callable[[], None]
    prove_first: bool = False
    moved: Callable[[int], None] = unnoticed


class OverwriteGuard:
    """Names (`group/name`) of partly overwritten live tensors."""

    def __init__(self) -> None:
        self._torn: set[str] = set()
        self._mended: Collection[str] = ()  # by the last restore

    @property
    def torn(self) -> bool:
        return bool(self._torn)

    def tear(self, names: Collection[str]) -> None:
        """These tensors are being overwritten from now on."""
        self._torn.update(names)

    def mend(self, names: Collection[str]) -> None:
        """These tensors are completely restored."""
        self._torn.difference_update(names)
        self._mended = names

    def take_back(self) -> None:
        """The last restore does not count: another rank could not read its part of that step."""
        self.tear(self._mended)

    def check(self) -> None:
        """Raise `StateOverwritten` if any tensor is partly overwritten."""
        if self._torn:
            first = min(self._torn)
            raise StateOverwritten(
                f"a restore failed and left {len(self._torn)} live tensors partly overwritten, among them {first}",
                hint="restore a sound step, or create new state and a new Checkpointer for it",
            )
