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
from holdfast_service.control.catalog.record_queue import RecordQueue
from holdfast_service.control.catalog.round_records import RoundRecords

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
        self.recorded = False  # whether the catalog has recorded it as open

    def seal(self, ranks: int) -> None:
        self.sealed = max(self.sealed, ranks)

    def end(self, ended: EndedRound) -> None:
        self.ended = ended

    def known_as(self, id: int | None, opened: str) -> None:
        """The catalog has it under this ID, or None: not any more."""
        self.id, self.opened = id, opened


class Rounds:
    """Thread-safe; nothing here waits for the catalog."""

    def __init__(self, records: RoundRecords, record_queue: RecordQueue, now: Callable[[], str]) -> None:
        self._records, self._record_queue, self._now = records, record_queue, now
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
            save = self._rounds[number]
            if quiet or save.recorded:
                return number
            save.recorded = True
        self._record_queue.enqueue(f"that the save of {run}@{step} has started", lambda: self._note(save))
        return number

    def seal(self, number: int, ranks: int) -> None:
        """Record how many ranks have sealed."""
        save = self._of(number)
        save.seal(ranks)
        if save.recorded:
            self._record_queue.enqueue("which ranks have sealed", lambda: self._note_seals(save))

    def end(
        self,
        number: int,
        state: End,
        code: str | None = None,
        detail: str | None = None,
        measured: Mapping[str, float] = NOTHING,
        notify: Callable[[str, int], None] = lambda run, step: None,
    ) -> None:
        """End a save. The first end counts; later ones change nothing. `notify` is called with run and step, where the
        catalog did not have the end from another node.
        """
        with self._lock:
            save = self._rounds.get(number)
            if save is None:
                raise NoSuchResource(f"there is no save with the round ID {number}")
            if save.ended is not None:
                return
            ended = self._ended(save, EndedRound(state, self._now(), code, detail, measured))

        def note() -> None:
            if self._note_end(save, ended):
                notify(save.key.run, save.key.step)

        self._record_queue.enqueue("how a save ended", note)

    def left(self, number: int, measured: Mapping[str, float] = NOTHING) -> None:
        """Another node has committed it and records that. So does this node if it recorded the progress: its earlier records
        may arrive after that end.
        """
        with self._lock:
            save = self._rounds.get(number)
            if save is not None and save.ended is None and not save.recorded:
                self._ended(save, EndedRound("committed", self._now(), None, None, measured))
                return
        self.end(number, "committed", measured=measured)

    def measure(self, number: int, measured: Mapping[str, float]) -> None:
        """Record timings found after its end."""
        with self._lock:
            save = self._rounds.get(number)
        if save is not None and (save.recorded or save.id is not None):
            self._record_queue.enqueue("what a save cost", lambda: self._records.measure(self._id(save), measured))

    def complete(self, run: str) -> list[tuple[int, int]]:
        """Step and attempt of the open rounds that all ranks have sealed."""
        with self._lock:
            going = [self._rounds[number] for number in self._open.values()]
        return [save.key[1:] for save in going if save.key[0] == run and save.sealed >= save.world]

    def knows(self, run: str, step: int, attempt: int) -> bool:
        """Whether this daemon has had such a save, open or ended."""
        key = RoundName(run, step, attempt)
        with self._lock:
            return any(one.key == key for one in self._rounds.values())

    def ids(self) -> list[int]:
        """The catalog's ids of the open rounds. In the book's thread only."""
        with self._lock:
            going = [save for number in self._open.values() if (save := self._rounds[number]).recorded]
        return [self._id(save) for save in going]

    def look_again(self) -> None:
        """The catalog may be another one now, in which rounds have other ids, or none. In the book's thread only."""
        with self._lock:
            rounds = list(self._rounds.values())
        for round in rounds:
            if round.id is not None and not self._records.matches(round.id, *round.key, round.opened):
                round.known_as(None, round.opened)

    def _ended(self, save: _Round, ended: EndedRound) -> EndedRound:
        save.end(ended)
        self._open.pop(save.key, None)
        return ended

    def _of(self, number: int) -> _Round:
        with self._lock:
            save = self._rounds.get(number)
        if save is None:
            raise NoSuchResource(f"there is no save with the round ID {number}")
        return save

    def _id(self, save: _Round) -> int:
        if save.id is not None:
            return save.id
        with self._lock:  # the step may have been tried before
            others = [one.id for one in self._rounds.values() if one.key == save.key and one.id is not None]
        id, opened = self._records.open(*save.key, save.world, save.opened, others)
        save.known_as(id, opened)
        return id

    def _note(self, save: _Round) -> None:
        self._id(save)

    def _note_seals(self, save: _Round) -> None:
        self._records.update(self._id(save), sealed=save.sealed)

    def _note_end(self, save: _Round, ended: EndedRound) -> bool:
        state, at, code, detail, measured = ended
        if state != "committed" and not save.recorded and self._records.knows(*save.key):
            return False  # another node of the save has recorded it
        return self._records.end(self._id(save), state, at, code, detail, **measured) is not None
