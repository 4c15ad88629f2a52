"""Copies tensors into a slot while training computes, and notices when one of them moved under the copy.

The work is cut into batches that threads take from one end: a background thread, which copies with one core so that the
training keeps the others, and at `fence()` as many more as there are cores, because nothing else can go on.
Autograd's version counters show what torch itself wrote. What it did not count (fused optimizers, writes through `.data` or
numpy, sparse ones too) shows in a word of every 512 bytes to 32 KiB, read in `save()` at a place that is drawn anew for each
save, and again as soon as the stretch around it has been copied. With `full`, digests of all bytes are compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import chain
from operator import length_hint
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.memory import native_copy
from holdfast.threads import background_requests
from holdfast.threads.latch import Latch
from holdfast_formats import digest
from holdfast_formats.errors import CheckpointError, TornSnapshot

BATCH_BYTES = 8 * 2**20  # small enough that two threads end at about the same time
BATCH_MOVES_MAX = 512
HELPERS_MAX = 7  # of a fence: a few cores have all of memory's bandwidth
WORDS = 2**16  # that `save()` looks at: each is a page of its own, and costs some 50 ns
STRETCH_BYTES_MIN, STRETCH_BYTES_MAX = 2**9, 2**15  # what one of them stands for: all of 64 KiB that changed is seen
_HINT = "change tensors in optimizer.step(), or call fence() before changing them, or save with wait='staged'"


class Move(NamedTuple):
    """Memory on its way: a live tensor's, or a stretch of it, and its place in the slot; of one shape and integer dtype."""

    name: str
    source: torch.Tensor
    target: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.source.numel() * self.source.element_size()


class Turn(Protocol):
    """A part of one save's work that one thread does, whichever takes it first."""

    def do(self) -> None:
        """Do it, in a thread of ours."""


class Track:
    """Moves that are copied together, and looked at before and after, with the views that this takes: made once, used at
    every save, by one save at a time.
    """

    def __init__(self, moves: Sequence[Move], stretch: int) -> None:
        pairs = [(move, (move.target.numpy(), move.source.numpy())) for move in moves]
        plain = [(move, pair) for move, pair in pairs if native_copy.is_plain(*pair)]
        other = [(move, pair) for move, pair in pairs if not native_copy.is_plain(*pair)]
        self.moves = [move for move, _ in (*plain, *other)]
        self.plain = native_copy.Noted([pair for _, pair in plain], stretch)
        self._other = [_Strided(*pair, stretch) for _, pair in other]

    def note_other(self, seed: int) -> None:
        """Note a part of what the live memory holds now that is not `plain`."""
        for number, other in enumerate(self._other):
            other.note(seed + number)

    def copy(self) -> list[bool]:
        """Copy everything, with one core; of each move, whether it is seen not to be any more what was noted."""
        return [*self.plain.copy().tolist(), *(other.copy() for other in self._other)]

    def digests(self, live: bool) -> list[int]:
        """Of each move, the digest of all that is in live memory, or of what was copied."""
        table, native = self.plain.table, digest.native()
        if native_copy.available() and native is not None:
            found = native_copy.digests(table[:, [1 if live else 0, 2]], native, None).tolist()
        else:
            found = [digest.number(_octets(move, live)) for move in self.moves[: len(table)]]
        return [*found, *(digest.number(_octets(move, live)) for move in self.moves[len(table) :])]


def _octets(move: Move, live: bool) -> NDArray[np.uint8]:
    array = (move.source if live else move.target).numpy()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class _Strided:
    """A move of memory that is not contiguous: one element is noted in so many as there are words in a stretch."""

    def __init__(self, target: NDArray[Any], source: NDArray[Any], stretch: int) -> None:
        self._target, self._source = target, source
        self._every = stretch
        self._places: tuple[NDArray[Any], ...] = ()
        self._before = self._source[:0]

    def note(self, seed: int) -> None:
        words = native_copy.places(self._source.size * native_copy.WORD_BYTES, self._every, seed, 0)
        self._places = np.unravel_index((words // native_copy.WORD_BYTES).astype(np.int64), self._source.shape)
        self._before = self._source[self._places]

    def copy(self) -> bool:
        np.copyto(self._target, self._source)
        return not np.array_equal(self._before, self._source[self._places])


class _Batch:
    """One save's turn of a track."""

    def __init__(self, track: Track, seed: int, full: bool) -> None:
        """Notes the version of every tensor, and with `full` a digest of all its bytes."""
        self._track = track
        self._versions = [version(move.source) for move in track.moves]
        self._digests = track.digests(live=True) if full else None
        track.note_other(seed)

    def do(self) -> None:
        """Copy; `TornSnapshot`, naming tensors, when what was copied is not what was there when the save was called."""
        changed = self._track.copy()
        versions = [version(move.source) for move in self._track.moves]
        if versions == self._versions and not any(changed) and self._digests is None:
            return
        copied = self._digests if self._digests is None else self._track.digests(live=False)
        names: dict[str, None] = {}
        for number, move in enumerate(self._track.moves):
            other = self._digests is not None and copied is not None and self._digests[number] != copied[number]
            if changed[number] or versions[number] != self._versions[number] or other:
                names[move.name] = None
        if names:
            raise torn(list(names))


def version(tensor: torch.Tensor) -> int:
    """How often torch has written to it; what was made in inference mode is not counted, and its samples alone tell."""
    return 0 if tensor.is_inference() else tensor._version


def torn(names: list[str]) -> TornSnapshot:
    """These tensors are not in the slot as they were when the save was called."""
    return TornSnapshot(f"{', '.join(names[:5])} changed while the save was being copied", hint=_HINT, tensors=names)


class BackgroundCopy:
    """The copy of one save. It begins with `start()`, or with a `fence()` that comes first."""

    def __init__(
        self,
        tracks: Sequence[Track],
        on_end: Callable[[CheckpointError | None], None],
        before: Sequence[Turn] = (),
        full: bool = False,
    ) -> None:
        """Notes the state of every tensor now, with `full` all of it. `on_end` is called once, in the background thread,
        when all is decided. The turns in `before` are taken first.
        """
        seed = int.from_bytes(os.urandom(7), "little")  # the user's random streams are not ours to draw from
        batches: list[Turn] = [*before]
        batches += (_Batch(track, seed + (number << 20), full) for number, track in enumerate(tracks))
        for stretch in {track.plain.stretch for track in tracks}:
            native_copy.note([track.plain for track in tracks if track.plain.stretch == stretch], seed)
        self._count = len(batches)
        self._left = iter(batches)  # a thread takes the next one in one step, as it notes what it did: no lock is needed
        self._done: list[CheckpointError | None] = []
        self._errors: list[CheckpointError] = []
        self._on_end = on_end
        self._started: dict[str, object] = {}
        self._copied, self._ended = Latch(), Latch()
        if not batches:
            self._copied.set()

    def start(self) -> None:
        """Begin; once, however often it is called."""
        background_requests.start(self._run, "holdfast-copier")

    def fence(self) -> None:
        """Return when nothing of the live state is needed any more. Never raises for the copy.

        Other threads do what is left, with all cores, and this one takes none of it: a signal handler that interrupts it
        here and fences, too, would wait for a batch that this thread goes on with when the handler has returned.
        """
        for _ in range(self._helpers()):
            background_requests.start(self._drain, "holdfast-fence")
        self._copied.wait()

    def join(self, timeout: float | None = None) -> bool:
        """Fence, then wait until `on_end` has returned; whether it has, within `timeout` seconds."""
        self.fence()
        return self._ended.wait(timeout)

    def _run(self) -> None:
        mine = object()
        if self._started.setdefault("by", mine) is not mine:
            return
        try:
            self._drain()
            self._copied.wait()
            self._on_end(self._errors[0] if self._errors else None)
        finally:
            self._ended.set()

    def _helpers(self) -> int:
        """How many threads: as many cores as torch computes with here, and a batch for each of them."""
        return min(torch.get_num_threads(), HELPERS_MAX + 1, length_hint(self._left))

    def _drain(self) -> None:
        for batch in self._left:
            self._do(batch)

    def _do(self, batch: Turn) -> None:
        error: CheckpointError | None = None
        try:
            if not self._errors:
                with torch.no_grad():
                    batch.do()
        except CheckpointError as torn:
            error = torn
        except Exception as unforeseen:
            error = CheckpointError(f"the background copy failed unexpectedly: {unforeseen!r}")
        if error is not None:
            self._errors.append(error)
        self._done.append(error)
        if len(self._done) == self._count:
            self._copied.set()


def lay_tracks(moves: Sequence[Move]) -> list[Track]:
    """Cut moves into tracks of some 8 MiB, or many small tensors, in order; what is larger is cut as well."""
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
    return [Track(part, stretch) for part in cut]


def stretch_of(nbytes: int) -> int:
    """In how many bytes one word is noted: a power of two, so that there are some 65 536 of them in so many bytes."""
    return min(max(1 << max(nbytes // WORDS - 1, 0).bit_length(), STRETCH_BYTES_MIN), STRETCH_BYTES_MAX)


def _parts(move: Move) -> list[Move]:
    """A large stretch of contiguous memory as several, so that it can be shared out."""
    if move.nbytes <= BATCH_BYTES or move.source.dim() != 1:
        return [move]
    step = BATCH_BYTES // move.source.element_size()
    starts = range(0, move.source.numel(), step)
    return [Move(move.name, move.source[at : at + step], move.target[at : at + step]) for at in starts]
