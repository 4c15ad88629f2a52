"""Copies tensors into a slot while training computes, and notices when one of them moved under the copy.

The work is cut into batches that threads take from one end: a background thread, which copies with one core so that the
training keeps the others, and whoever calls `fence()`, which copies with all of them because nothing else can go on.
Each batch is compared as soon as it is copied. Autograd's version counters show what torch itself wrote; a strided sample of
the elements shows what it did not count (fused optimizers, writes through `.data` or numpy).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast_formats.errors import CheckpointError, TornSnapshot

from . import streaming

BATCH_BYTES = 8 * 2**20  # small enough that two threads end at about the same time
BATCH_MOVES_MAX = 512
HELPERS_MAX = 7  # of a fence: a few cores have all of memory's bandwidth
SAMPLE_WORDS = 16  # of each move: eight bytes wide where its memory is contiguous
SAMPLES_A_DIMENSION = {1: 16, 2: 4, 3: 3}  # else 2, where it is not: some sixteen elements
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

    def do(self, helping: bool) -> None:
        """Do it, in a thread of ours or, `helping`, in the one that waits at the fence."""


class Track:
    """Moves that are copied and compared together, with the views that this takes: made once, used at every save."""

    def __init__(self, moves: Sequence[Move]) -> None:
        self.moves = moves
        arrays = [(move.target.numpy(), move.source.numpy()) for move in moves]
        plain = [all(array.flags.c_contiguous for array in pair) for pair in arrays]
        self.targets = streaming.Words([_sample(pair[0], alike) for pair, alike in zip(arrays, plain, strict=True)])
        self.sources = streaming.Words([_sample(pair[1], alike) for pair, alike in zip(arrays, plain, strict=True)])
        self._plain = streaming.Copies([pair for pair in arrays if streaming.is_plain(*pair)])
        self._other = [pair for pair in arrays if not streaming.is_plain(*pair)]

    def copy(self) -> None:
        """Copy everything, with one core."""
        self._plain.do()
        for target, source in self._other:
            np.copyto(target, source)


class _Batch:
    """One save's turn of a track."""

    def __init__(self, track: Track, before: bytes) -> None:
        self._moves, self._track = track.moves, track
        self._versions = [move.source._version for move in track.moves]
        self._before = before

    def do(self, helping: bool) -> None:
        """Copy and compare."""
        self._track.copy()
        self._check()

    def _check(self) -> None:
        """`TornSnapshot`, naming the tensor, when what was copied is not what was there when the save was called."""
        copied, now = streaming.look([self._track.targets, self._track.sources])
        same = [move.source._version for move in self._moves] == self._versions
        if same and self._before == now == copied:
            return
        raise torn(self._changed(now, copied))

    def _changed(self, now: bytes, copied: bytes) -> list[str]:
        """The names of what moved, by version or by sample, now that some did."""
        changed: dict[str, None] = {}
        at = 0
        for move, version, size in zip(self._moves, self._versions, self._track.sources.sizes, strict=True):
            part = slice(at, at + streaming.WORD_BYTES * size)
            at = part.stop
            same = self._before[part] == now[part] == copied[part]
            if move.source._version != version or not same:
                changed[move.name] = None
        return list(changed)


def torn(names: list[str]) -> TornSnapshot:
    """These tensors are not in the slot as they were when the save was called."""
    return TornSnapshot(f"{', '.join(names[:5])} changed while the save was copying", hint=_HINT, tensors=names)


def _sample(array: NDArray[Any], contiguous: bool) -> NDArray[Any]:
    """A few words of contiguous memory, a few elements of any other, as a view of whatever strides."""
    if contiguous:
        words = array.size * array.itemsize // 8
        octets = array.reshape(-1).view(np.uint8)
        return octets if words < SAMPLE_WORDS else octets[: words * 8].view(np.int64)[:: words // SAMPLE_WORDS]
    count = SAMPLES_A_DIMENSION.get(array.ndim, 2)
    return array[tuple(slice(0, None, max(-(-size // count), 1)) for size in array.shape)]


class BackgroundCopy:
    """The copy of one save. It begins with `start()`, or with a `fence()` that comes first."""

    def __init__(
        self, tracks: Sequence[Track], on_end: Callable[[CheckpointError | None], None], before: Sequence[Turn] = ()
    ) -> None:
        """Notes the state of every tensor now. `on_end` is called once, in the background thread, when all is decided.

        The turns in `before` are taken first.
        """
        self._batches: list[Turn] = [*before, *map(_Batch, tracks, streaming.look([track.sources for track in tracks]))]
        self._on_end = on_end
        self._lock = threading.Condition()
        self._next = 0
        self._left = len(self._batches)
        self._error: CheckpointError | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-copier", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def fence(self) -> None:
        """Return when nothing of the live state is needed any more, helping with what is left. Never raises for the copy."""
        for _ in range(self._helpers()):
            threading.Thread(target=self._drain, args=(False,), name="holdfast-fence", daemon=True).start()
        self._drain(helping=True)
        with self._lock:
            self._lock.wait_for(lambda: self._left == 0)

    def join(self) -> None:
        """Fence, then wait until `on_end` has returned."""
        self.fence()
        self._thread.join()

    def _run(self) -> None:
        self._drain(helping=False)
        with self._lock:
            self._lock.wait_for(lambda: self._left == 0)
        self._on_end(self._error)

    def _helpers(self) -> int:
        """How many threads besides the caller's: as many cores as torch computes with here, and a batch for each of them."""
        with self._lock:
            left = len(self._batches) - self._next
        return max(min(torch.get_num_threads(), HELPERS_MAX + 1, left) - 1, 0)

    def _drain(self, helping: bool) -> None:
        while (batch := self._take()) is not None:
            self._do(batch, helping)

    def _take(self) -> Turn | None:
        with self._lock:
            if self._next == len(self._batches):
                return None
            self._next += 1
            return self._batches[self._next - 1]

    def _do(self, batch: Turn, helping: bool) -> None:
        error: CheckpointError | None = None
        try:
            if self._error is None:
                with torch.no_grad():
                    batch.do(helping)
        except CheckpointError as torn:
            error = torn
        except Exception as unforeseen:
            error = CheckpointError(f"the background copy failed: {unforeseen!r}")
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            self._lock.notify_all()


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
    return [Track(part) for part in cut]


def _parts(move: Move) -> list[Move]:
    """A large stretch of contiguous memory as several, so that it can be shared out."""
    if move.nbytes <= BATCH_BYTES or move.source.dim() != 1:
        return [move]
    step = BATCH_BYTES // move.source.element_size()
    starts = range(0, move.source.numel(), step)
    return [Move(move.name, move.source[at : at + step], move.target[at : at + step]) for at in starts]
