"""Copies tensors into a slot while training computes, and detects tensors that changed during the copy.

The work is cut into batches, which threads take one after the other. A background thread copies with one core, so that the
training keeps the others. `fence()` adds as many threads as there are cores, because the training waits then.

Autograd's version counters show what torch itself wrote. Other writes (fused optimizers, writes through `.data` or numpy,
also sparse ones) are detected by samples: one word of every 512 bytes to 32 KiB is read in `save()`, at a place that is
drawn again for each save, and again as soon as the stretch around it has been copied. With `full`, digests of all bytes are
compared.

Frozen tensors are compared with what the slot has, and only what differs is written. If all of it was there the last time,
torch has not written to the tensors since, and words of tensors and slot are equal, then the slot has them already: a
comparison of all bytes comes last, and a step of an optimizer does not wait for it. A difference fails the save.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, chain, compress
from operator import length_hint, not_
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.memory import native_copy
from holdfast.memory.native_copy import NotedElements
from holdfast.stage.strided_moves import Pair, StridedMoves
from holdfast.threads import own_threads
from holdfast.threads.latch import Latch
from holdfast_formats import digest
from holdfast_formats.errors import CheckpointError, TornSnapshot

BATCH_BYTES = 8 * 2**20  # small enough that two threads end at about the same time
BATCH_MOVES_MAX = 512
HELPERS_MAX = 7  # of a fence: a few cores use all of memory's bandwidth
WORDS = 2**16  # that `save()` reads: each is on a page of its own, and costs some 50 ns
CUT_ROWS = 64  # parts of a matrix have a multiple of this many rows, so that all begin at a line of the cache
STRETCH_BYTES_MIN, STRETCH_BYTES_MAX = 2**9, 2**15  # per word: a change of 64 KiB in a row is always detected
_HINT = "change tensors in optimizer.step(), or call fence() before changing them, or save with wait='staged'"


class Move(NamedTuple):
    """One copy: a live tensor, or a stretch of it, and its place in the slot, both of one shape and integer dtype."""

    name: str
    source: torch.Tensor
    target: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.source.numel() * self.source.element_size()


class Turn(Protocol):
    """A part of one save's work that is done by one thread, whichever takes it first."""

    def do(self) -> None:
        """Run on a background thread."""


class Lateness:
    """Whether an optimizer step may come before the comparison of frozen tensors. One that differs ends that for good."""

    def __init__(self) -> None:
        self.allowed = True


class _TrackMoves(NamedTuple):
    """The moves of a track: of contiguous memory, and of other memory."""

    plain: list[tuple[Move, Pair]]
    strided: list[tuple[Move, Pair]]


class Track:
    """Moves that are copied together and compared before and after, with the views needed for this.

    A track is made once and used by every save, by one save at a time. With `lateness`, the tensors are frozen.
    """

    def __init__(
        self, moves: _TrackMoves, strided: StridedMoves, first: int, stretch: int, lateness: Lateness | None = None
    ) -> None:
        """The strided moves are those of `strided` from number `first` on."""
        self.moves = [move for move, _ in (*moves.plain, *moves.strided)]
        self.plain = native_copy.Noted([pair for _, pair in moves.plain], stretch)
        self.strided, self._numbers = strided, range(first, first + len(moves.strided))
        self._lateness = lateness
        self._kept: list[int] | None = None  # the versions that were found in the slot

    @property
    def versions(self) -> list[int]:
        """torch's write counters of the tensors."""
        try:
            return [move.source._version for move in self.moves]
        except RuntimeError:  # of an inference tensor
            return [version(move.source) for move in self.moves]

    @property
    def may_be_late(self) -> bool:
        """Whether the last copy found everything in the slot, and torch has not written to the tensors since."""
        return self._lateness is not None and self._lateness.allowed and self._kept == self.versions

    def forget(self) -> None:
        """Slot or tensors have other bytes than at the last save."""
        self._kept = None

    def copy(self, versions: list[int]) -> list[bool]:
        """Copy everything, with one core; return for each move whether its source is seen to differ from what was noted,
        when it had these versions.
        """
        plain = self.plain.copy(renew=self._lateness is not None)
        self._kept = None if self._numbers or plain.wrote.any() else versions
        return [*plain.changed.tolist(), *map(self.strided.copy, self._numbers)]

    def compare(self) -> None:
        """Raise `TornSnapshot` with the names of tensors that are not in the slot."""
        differing = self.plain.differing().tolist()
        if any(differing):
            assert self._lateness is not None
            self._lateness.allowed, self._kept = False, None
            names = [move.name for move, differs in zip(self.moves, differing, strict=True) if differs]
            raise torn(list(dict.fromkeys(names)), "since the save before, perhaps while this one was being compared")

    def digests(self, live: bool) -> list[int]:
        """Return a digest for each move, of all bytes in live memory or of the copied bytes."""
        table, native = self.plain.table, digest.native()
        if native_copy.available() and native is not None:
            found = native_copy.digests(table[:, [1 if live else 0, 2]], native, None).tolist()
        else:
            found = [digest.number(_octets(move, live)) for move in self.moves[: len(table)]]
        return [*found, *(digest.number(_octets(move, live)) for move in self.moves[len(table) :])]


def _octets(move: Move, live: bool) -> NDArray[np.uint8]:
    array = (move.source if live else move.target).numpy()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class Samples(NamedTuple):
    """What was in the sources of some tracks at one moment: words of each track, and elements of their strided moves."""

    words: list[native_copy.NotedWords]
    elements: list[NotedElements]


class TrackSources:
    """The sources of tracks, which have one length of a stretch."""

    def __init__(self, tracks: Sequence[Track]) -> None:
        self._plain, self._strided = native_copy.NotedSources([track.plain for track in tracks]), _strided(tracks)

    def sample(self) -> Samples:
        """Read samples of them."""
        seed = _seed()
        return Samples(self._plain.read(seed), [one.read(seed) for one in self._strided])


def _note(tracks: Sequence[Track], samples: Samples) -> None:
    for track, words in zip(tracks, samples.words, strict=True):
        track.plain.noted(words)
    for strided, elements in zip(_strided(tracks), samples.elements, strict=True):
        strided.noted(elements)


def _strided(tracks: Sequence[Track]) -> list[StridedMoves]:
    return list({id(track.strided): track.strided for track in tracks}.values())


def _seed() -> int:
    return int.from_bytes(os.urandom(7), "little")  # not torch's generator: that would change the user's random streams


class _Batch:
    """The copy of one track for one save."""

    def __init__(self, track: Track, full: bool) -> None:
        """Record the version of every tensor, and with `full` a digest of all its bytes."""
        self._track = track
        self._versions = track.versions
        self._digests = track.digests(live=True) if full else None

    def do(self) -> None:
        """Copy; raise `TornSnapshot` with tensor names if the copy differs from the state at the call of `save()`."""
        changed = self._track.copy(self._versions)
        versions = self._track.versions
        if versions == self._versions and not any(changed) and self._digests is None:
            return
        copied = self._digests if self._digests is None else self._track.digests(live=False)
        names: dict[str, None] = {}
        for number, move in enumerate(self._track.moves):
            other = self._digests is not None and copied is not None and self._digests[number] != copied[number]
            if changed[number] or versions[number] != self._versions[number] or other:
                names[move.name] = None
        if names:
            self._track.forget()
            raise torn(list(names))


class _Comparison(NamedTuple):
    """The comparison of one frozen track with the slot, for one save."""

    track: Track

    def do(self) -> None:
        self.track.compare()


def version(tensor: torch.Tensor) -> int:
    """torch's write counter of the tensor. Inference tensors have none; only samples detect their writes."""
    return 0 if tensor.is_inference() else tensor._version


def torn(names: list[str], when: str = "while the save was being copied") -> TornSnapshot:
    """The error for tensors that changed between `save()` and the end of their copy."""
    return TornSnapshot(f"{', '.join(names[:5])} changed {when}", hint=_HINT, tensors=names)


class _Part:
    """Some turns of a copy: a thread takes the next one, or notes a result, in one step, so no lock is needed."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._count = len(turns)
        self.left = iter(turns)
        self._ended: list[None] = []
        self.done = Latch()
        if not turns:
            self.done.set()

    def end_one(self) -> None:
        self._ended.append(None)
        if len(self._ended) == self._count:
            self.done.set()


class BackgroundCopy:
    """The copy of one save. It begins with `start()`, or with a `fence()` that comes first."""

    def __init__(
        self,
        tracks: Sequence[Track],
        on_end: Callable[[CheckpointError | None], None],
        before: Sequence[Turn] = (),
        full: bool = False,
        late: bool = False,
        samples: Samples | None = None,
    ) -> None:
        """Record the state of every tensor, with `full` all bytes. `on_end` is called once, in the background thread;
        the turns in `before` run first. With `late`, frozen tensors that are in the slot already may come after a step.
        `samples` are of the first tracks, which are not frozen: they were read a moment ago.
        """
        waiting = [track for track in tracks if late and not full and track.may_be_late]
        alike = zip(waiting, native_copy.alike([track.plain for track in waiting], _seed()), strict=True)
        compared = {id(track): track for track, same in alike if same}
        copied = [track for track in tracks if id(track) not in compared]
        batches = [_Batch(track, full) for track in copied]
        sampled = 0 if samples is None else len(samples.words)
        if samples is not None:
            _note(tracks[:sampled], samples)
        known = set(map(id, tracks[:sampled]))
        rest = [track for track in copied if id(track) not in known]
        for stretch in {track.plain.stretch for track in rest}:
            alike_long = [track for track in rest if track.plain.stretch == stretch]
            _note(alike_long, TrackSources(alike_long).sample())
        self._first, self._late = _Part([*before, *batches]), _Part(list(map(_Comparison, compared.values())))
        self._errors: list[CheckpointError] = []
        self._on_end = on_end
        self._started: dict[str, object] = {}
        self.ended = Latch()

    def start(self) -> None:
        """Start the copy; later calls do nothing."""
        own_threads.start(self._run, "holdfast-copier")

    def fence(self) -> None:
        """Return when the save no longer reads the live state. Never raises for a failed copy.

        Only other threads copy, with all cores. If this thread copied too, a signal handler that interrupts it and
        fences would wait for a batch that cannot continue before the handler returns.
        """
        self._wait(self._first, self._late)

    def fence_step(self, stay: Callable[[], bool]) -> None:
        """Return when the save no longer reads what a step of an optimizer changes. Frozen tensors may be left, if they
        `stay` frozen.
        """
        if self._late.done.is_set() or stay():
            self._wait(self._first)
        else:
            self.fence()

    def join(self, timeout: float | None = None) -> bool:
        """Fence, then wait until `on_end` has returned. Return whether it has, within `timeout` seconds."""
        self.fence()
        return self.ended.wait(timeout)

    def _run(self) -> None:
        mine = object()
        if self._started.setdefault("by", mine) is not mine:
            return
        try:
            self._drain(self._first, self._late)
            self._first.done.wait()
            self._late.done.wait()
            self._on_end(self._errors[0] if self._errors else None)
        finally:
            self._on_end = _heard  # else both kept each other, and the save's whole state, until Python looks for circles
            self.ended.set()

    def _wait(self, *parts: _Part) -> None:
        left = sum(length_hint(part.left) for part in parts)
        for _ in range(min(torch.get_num_threads(), HELPERS_MAX + 1, left)):  # as many as torch computes with
            own_threads.start(partial(self._drain, *parts), "holdfast-fence")
        for part in parts:
            part.done.wait()

    def _drain(self, *parts: _Part) -> None:
        with own_threads.computing():
            for part in parts:
                for turn in part.left:
                    self._do(turn)
                    part.end_one()

    def _do(self, turn: Turn) -> None:
        error: CheckpointError | None = None
        try:
            if not self._errors:
                with torch.no_grad():
                    turn.do()
        except CheckpointError as torn:
            error = torn
        except Exception as unforeseen:
            error = CheckpointError(f"the background copy failed unexpectedly: {unforeseen!r}")
        if error is not None:
            self._errors.append(error)


def _heard(error: CheckpointError | None) -> None:
    """Replaces `on_end` after it has been called."""


def lay_tracks(moves: Sequence[Move], lateness: Lateness | None = None) -> list[Track]:
    """Cut moves into tracks of some 8 MiB, or of many small tensors, in order. Larger moves are cut as well. With
    `lateness`, they are of frozen tensors.
    """
    cut: list[list[Move]] = []
    room = 0
    for move in chain.from_iterable(map(_parts, moves)):
        size = move.nbytes
        if not cut or size > room or len(cut[-1]) == BATCH_MOVES_MAX:
            cut.append([])
            room = BATCH_BYTES
        cut[-1].append(move)
        room -= size
    stretch = stretch_of(sum(move.nbytes for move in moves))
    parts = list(map(_told_apart, cut))
    strided = StridedMoves([pair for part in parts for _, pair in part.strided], stretch)
    firsts = accumulate((len(part.strided) for part in parts), initial=0)
    return [Track(part, strided, first, stretch, lateness) for part, first in zip(parts, firsts, strict=False)]


def _told_apart(moves: Sequence[Move]) -> _TrackMoves:
    pairs = [(move, (move.target.numpy(), move.source.numpy())) for move in moves]
    plain = [native_copy.is_plain(*pair) for _, pair in pairs]
    return _TrackMoves(list(compress(pairs, plain)), list(compress(pairs, map(not_, plain))))


def stretch_of(nbytes: int) -> int:
    """The length in bytes of the stretch for which one word is noted: a power of two that gives some 65 536 words in all."""
    return min(max(1 << max(nbytes // WORDS - 1, 0).bit_length(), STRETCH_BYTES_MIN), STRETCH_BYTES_MAX)


def _parts(move: Move) -> list[Move]:
    """Cut a large move into several, so that threads can share it."""
    if move.nbytes <= BATCH_BYTES:
        return [move]
    rows = len(move.source)
    step = max(BATCH_BYTES // (move.nbytes // rows) // CUT_ROWS, 1) * CUT_ROWS
    starts = range(0, rows, step)
    return [Move(move.name, move.source[at : at + step], move.target[at : at + step]) for at in starts]
