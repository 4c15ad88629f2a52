"""This daemon's saves (rounds): started and ended here at once, and recorded in the catalog afterwards.

A save has a number of this daemon. The catalog's ID becomes known when the catalog records it.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from holdfast_formats.errors import NoSuchResource
from holdfast_service.control.catalog.book import Book
from holdfast_service.control.catalog.catalog import Catalog

ENDED_MAX = 512  # rounds kept for late records
NOTHING: Mapping[str, float] = {}
End = Literal["committed", "aborted", "dropped"]


class RoundName(NamedTuple):
    """The save of a step by an attempt of a run."""

    run: str
    step: int
    attempt: int


class EndedRound(NamedTuple):
    state: End
    at: str
    code: str | None
    detail: str | None
    measured: Mapping[str, float]


class _Round:
    """`id` is the catalog's, known once it has recorded the round."""

    def __init__(self, key: RoundName, world: int, opened: str) -> None:
        self.key, self.world, self.opened = key, world, opened
        self.sealed = 0
        self.id: int | None = None
        self.ended: EndedRound | None = None
        self.told = False  # whether the catalog has recorded it as open


class Rounds:
    """Thread-safe; nothing here waits for the catalog."""

    def __init__(self, catalog: Catalog, book: Book, now: Callable[[], str]) -> None:
        self._catalog, self._book, self._now = catalog, book, now
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._rounds: OrderedDict[int, _Round] = OrderedDict()
        self._open: dict[RoundName, int] = {}

    def open(self, run: str, step: int, attempt: int, world: int, quiet: bool = False) -> int:
        """The number of the save of this step and attempt: the current one, or a new one. `quiet`: another node records its
        progress; this one, only why it ended.
        """
        key = RoundName(run, step, attempt)
        with self._lock:
            number = self._open.get(key)
            if number is None:
                number = self._open[key] = next(self._numbers)
                self._rounds[number] = _Round(key, world, self._now())
                while len(self._rounds) > ENDED_MAX + len(self._open):
                    oldest = next(number for number, one in self._rounds.items() if one.ended is not None)
                    del self._rounds[oldest]
            made = self._rounds[number]
            if quiet or made.told:
                return number
            made.told = True
        self._book.tell(f"that the save of {run}@{step} has started", lambda: self._note(made))
        return number

    def seal(self, number: int, ranks: int) -> None:
        """Record how many ranks have sealed."""
        made = self._of(number)
        made.sealed = max(made.sealed, ranks)
        if made.told:
            self._book.tell("which ranks have sealed", lambda: self._note_seals(made))

    def end(
        self,
        number: int,
        state: End,
        code: str | None = None,
        detail: str | None = None,
        measured: Mapping[str, float] = NOTHING,
        told: Callable[[str, int], None] = lambda run, step: None,
    ) -> None:
        """End a save. The first end counts; later ones change nothing. `told` is called with run and step, where the catalog
        did not have the end from another node.
        """
        with self._lock:
            made = self._rounds.get(number)
            if made is None:
                raise NoSuchResource(f"there is no save with the round ID {number}")
            if made.ended is not None:
                return
            made.ended = ended = EndedRound(state, self._now(), code, detail, measured)
            self._open.pop(made.key, None)

        def note() -> None:
            if self._note_end(made, ended):
                told(made.key.run, made.key.step)

        self._book.tell("how a save ended", note)

    def left(self, number: int, measured: Mapping[str, float] = NOTHING) -> None:
        """Another node has committed it and records that. So does this node if it recorded the progress: its earlier records
        may arrive after that end.
        """
        with self._lock:
            made = self._rounds.get(number)
            if made is not None and made.ended is None and not made.told:
                made.ended = EndedRound("committed", self._now(), None, None, measured)
                self._open.pop(made.key, None)
                return
        self.end(number, "committed", measured=measured)

    def measure(self, number: int, measured: Mapping[str, float]) -> None:
        """Record timings found after its end."""
        with self._lock:
            made = self._rounds.get(number)
        if made is not None and (made.told or made.id is not None):
            self._book.tell("what a save cost", lambda: self._catalog.measure_round(self._id(made), measured))

    def complete(self, run: str) -> list[tuple[int, int]]:
        """Step and attempt of the open rounds that all ranks have sealed."""
        with self._lock:
            going = [self._rounds[number] for number in self._open.values()]
        return [made.key[1:] for made in going if made.key[0] == run and made.sealed >= made.world]

    def knows(self, run: str, step: int, attempt: int) -> bool:
        """Whether this daemon has had such a save, open or ended."""
        key = RoundName(run, step, attempt)
        with self._lock:
            return any(one.key == key for one in self._rounds.values())

    def ids(self) -> list[int]:
        """The catalog's ids of the open rounds. In the book's thread only."""
        with self._lock:
            going = [made for number in self._open.values() if (made := self._rounds[number]).told]
        return [self._id(made) for made in going]

    def look_again(self) -> None:
        """The catalog may be another one now, in which rounds have other ids, or none. In the book's thread only."""
        with self._lock:
            rounds = list(self._rounds.values())
        for made in rounds:
            if made.id is not None and not self._catalog.is_round(made.id, *made.key, made.opened):
                made.id = None

    def _of(self, number: int) -> _Round:
        with self._lock:
            made = self._rounds.get(number)
        if made is None:
            raise NoSuchResource(f"there is no save with the round ID {number}")
        return made

    def _id(self, made: _Round) -> int:
        if made.id is None:
            with self._lock:  # the step may have been tried before
                others = [one.id for one in self._rounds.values() if one.key == made.key and one.id is not None]
            made.id, made.opened = self._catalog.note_round(*made.key, made.world, made.opened, others)
        return made.id

    def _note(self, made: _Round) -> None:
        self._id(made)

    def _note_seals(self, made: _Round) -> None:
        self._catalog.update_round(self._id(made), sealed=made.sealed)

    def _note_end(self, made: _Round, ended: EndedRound) -> bool:
        state, at, code, detail, measured = ended
        if state != "committed" and not made.told and self._catalog.knows_round(*made.key):
            return False  # another node of the save has recorded it
        return self._catalog.end_round(self._id(made), state, at, code, detail, **measured) is not None
