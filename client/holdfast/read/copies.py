"""The copies of a checkpoint that a reader has, the nearest first: what one of them lacks is read from the next.

A copy farther away is not asked for anything before it is needed. It counts only with the COMMIT of the one that was opened:
then its files have the same bytes, and every digest of the manifest holds for them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from holdfast.read.sources import Source
from holdfast_files import opened
from holdfast_formats.errors import CheckpointError, Damaged, NoSuchCheckpoint, NotFound

_Result = TypeVar("_Result")


class CheckpointCopy(NamedTuple):
    """A copy of a checkpoint: its name in reports, "" for that of the root, and what opens its files."""

    name: str
    open: Callable[[], Source]


class OtherCopies(NamedTuple):
    """The copies behind the nearest one, whose name is `nearest`; and the problems of copies that were passed over, to which
    readers add.
    """

    nearest: str
    behind: Sequence[CheckpointCopy]
    problems: dict[str, CheckpointError]


class Copies:
    """Thread-safe. `taken` has the bytes that were handed over from each copy but the nearest, by name."""

    def __init__(self, nearest: Source, commit: bytes, others: OtherCopies | None = None) -> None:
        """`commit` is the nearest copy's COMMIT."""
        self.name, self._others, self._problems = others or OtherCopies("", (), {})
        self.taken: Counter[str] = Counter()
        self.nearest, self._commit = nearest, commit
        self._opened: dict[str, Source] = {}
        self._away: set[str] = set()  # what cannot be read at all is not tried for every range
        self._lock = threading.Lock()

    @property
    def alone(self) -> bool:
        """Whether there is no other copy than the nearest."""
        return not self._others

    def read(self, act: Callable[[Source], _Result], size: int = 0) -> _Result:
        """The result of `act` on the nearest copy on which it does not fail. Raises the damage of the nearest one that is
        damaged, or else the first error. `size` is the number of bytes that it hands over.
        """
        if self.alone:
            return act(self.nearest)
        errors: list[CheckpointError] = []
        for copy in (CheckpointCopy(self.name, lambda: self.nearest), *self._others):
            if copy.name in self._away:
                continue
            try:
                result = act(self._reached(copy))
            except CheckpointError as error:
                errors.append(error)
                self._pass_over(copy.name, error)
                continue
            if copy.name != self.name:
                with self._lock:
                    self.taken[copy.name] += size
            return result
        errors = errors or list(self._problems.values())
        raise next((error for error in errors if isinstance(error, Damaged)), errors[0])

    def close(self) -> None:
        """Close the copies farther away."""
        with self._lock:
            while self._opened:
                self._opened.popitem()[1].close()

    def _reached(self, copy: CheckpointCopy) -> Source:
        if copy.name == self.name:
            return self.nearest
        with self._lock:
            if copy.name in self._away:  # another thread has tried, while this one waited
                raise self._problems[copy.name]
            if copy.name not in self._opened:
                try:
                    self._opened[copy.name] = self._open(copy)
                except CheckpointError as error:
                    self._problems.setdefault(copy.name, error)
                    self._away.add(copy.name)
                    raise
            return self._opened[copy.name]

    def _open(self, copy: CheckpointCopy) -> Source:
        source = copy.open()
        try:
            if opened.read_commit(source) != self._commit:
                raise NoSuchCheckpoint(
                    f"{source.label} is not a copy of {self.nearest.label}",
                    hint="`holdfast verify` checks each copy: remove the one of another save",
                )
        except BaseException:
            source.close()
            raise
        return source

    def _pass_over(self, name: str, error: CheckpointError) -> None:
        with self._lock:
            self._problems.setdefault(name, error)
            if not isinstance(error, Damaged | NotFound):
                self._away.add(name)
