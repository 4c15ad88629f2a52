"""What a restore has begun to write over and has not finished: nobody trains on it, and nobody saves it.

What is found wrong is taken out of a live tensor again, but what was proven belongs together only once all of it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from holdfast_formats.errors import StateOverwritten

OVERWRITTEN = (
    "live tensors have been partly overwritten, and are neither trained on nor saved before a restore succeeds: restore "
    "another step, or end; restore(prove_first=True) overwrites nothing unless all is sound"
)


class Overwriting(NamedTuple):
    """How live tensors are overwritten: `begins` is told before the first byte of them changes; with `prove_first` that is
    when everything was found sound, else each extent is proven by itself and is read only once."""

    begins: Callable[[], None]
    prove_first: bool = False


class OverwriteGuard:
    """Names `group/name` of live tensors that hold a part of a checkpoint."""

    def __init__(self) -> None:
        self._torn: set[str] = set()
        self._mended: Collection[str] = ()  # by the last restore

    @property
    def torn(self) -> bool:
        return bool(self._torn)

    def tear(self, names: Collection[str]) -> None:
        """These are being overwritten from now on."""
        self._torn.update(names)

    def mend(self, names: Collection[str]) -> None:
        """These are as they were saved, all of them."""
        self._torn.difference_update(names)
        self._mended = names

    def take_back(self) -> None:
        """The last restore does not count: another rank could not read its part of that step."""
        self.tear(self._mended)

    def check(self) -> None:
        """`StateOverwritten` where anything is torn."""
        if self._torn:
            first = min(self._torn)
            raise StateOverwritten(
                f"a restore failed with {len(self._torn)} live tensors partly overwritten, {first} among them",
                hint="restore a sound step, or make the state anew and a Checkpointer for it",
            )
