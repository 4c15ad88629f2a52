"""Copies tensors into a slot while training computes, and notices when one of them moved under the copy.

The work is cut into batches that two threads take from one end: a background thread, which copies with one core so that
the training keeps the others, and whoever calls `fence()`, which copies with all of them because nothing else can go on.
Each batch is compared as soon as it is copied. Autograd's version counters show what torch itself wrote; a strided sample of
the elements shows what it did not count (fused optimizers, writes through `.data` or numpy).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from holdfast_formats.errors import CheckpointError, TornSnapshot

BATCH_BYTES = 16 * 2**20
BATCH_MOVES_MAX = 512
SAMPLES_A_DIMENSION = {1: 16, 2: 4, 3: 3}  # else 2: some sixteen elements of each tensor
_HINT = "change tensors in optimizer.step(), or call fence() before changing them, or save with wait='staged'"


Samples = dict[torch.dtype, torch.Tensor]


class Move(NamedTuple):
    """One tensor on its way: live memory and its place in the slot, of one shape and unsigned dtype, both on the CPU."""

    name: str
    source: torch.Tensor
    target: torch.Tensor


class Track:
    """Moves that are copied and compared together, with the views that this takes: made once, used at every save."""

    def __init__(self, moves: Sequence[Move]) -> None:
        self.moves = moves
        self.sources = [_sample(move.source) for move in moves]
        self.targets = [_sample(move.target) for move in moves]


class _Batch:
    """One save's turn of a track."""

    def __init__(self, track: Track) -> None:
        self._moves, self._track = track.moves, track
        self._versions = [move.source._version for move in track.moves]
        self._before = _gather(track.sources)

    def copy_on_one_core(self) -> None:
        for move in self._moves:
            np.copyto(move.target.numpy(), move.source.numpy())

    def copy_on_all_cores(self) -> None:
        torch._foreach_copy_([m.target for m in self._moves], [m.source for m in self._moves])

    def check(self) -> None:
        """`TornSnapshot`, naming the tensor, when what was copied is not what was there when the save was called."""
        copied = _gather(self._track.targets)
        same = [move.source._version for move in self._moves] == self._versions
        if same and _equal(self._before, _gather(self._track.sources)) and _equal(self._before, copied):
            return
        changed = self._changed(copied)
        raise TornSnapshot(f"{', '.join(changed[:5])} changed while the save was copying", hint=_HINT, tensors=changed)

    def _changed(self, copied: Samples) -> list[str]:
        """The names of what moved, by version or by sample, now that some did."""
        changed, now = [], _gather(self._track.sources)
        at = dict.fromkeys(self._before, 0)
        for move, version, sample in zip(self._moves, self._versions, self._track.sources, strict=True):
            kind, part = sample.dtype, slice(at[sample.dtype], at[sample.dtype] + sample.numel())
            at[kind] = part.stop
            before = self._before[kind][part]
            if move.source._version != version or any(not _same(before, x[kind][part]) for x in (now, copied)):
                changed.append(move.name)
        return changed


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """A few elements of every dimension, as a view of whatever strides."""
    count = SAMPLES_A_DIMENSION.get(tensor.dim(), 2)
    return tensor[tuple(slice(0, None, max(-(-size // count), 1)) for size in tensor.shape)]


def _gather(samples: Sequence[torch.Tensor]) -> Samples:
    """The samples' values now, one tensor a width, in order."""
    parts: dict[torch.dtype, list[torch.Tensor]] = {}
    for sample in samples:
        parts.setdefault(sample.dtype, []).append(sample.reshape(-1))
    return {width: torch.cat(listed) for width, listed in parts.items()}


def _equal(a: Samples, b: Samples) -> bool:
    return all(_same(values, b[width]) for width, values in a.items())


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return np.array_equal(a.numpy(), b.numpy())


class BackgroundCopy:
    """The copy of one save. It begins with `start()`, or with a `fence()` that comes first."""

    def __init__(self, tracks: Sequence[Track], on_end: Callable[[CheckpointError | None], None]) -> None:
        """Notes the state of every tensor now. `on_end` is called once, in the background thread, when all is decided."""
        self._batches = [_Batch(track) for track in tracks]
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
        while (batch := self._take()) is not None:
            self._do(batch, _Batch.copy_on_all_cores)
        with self._lock:
            self._lock.wait_for(lambda: self._left == 0)

    def join(self) -> None:
        """Fence, then wait until `on_end` has returned."""
        self.fence()
        self._thread.join()

    def _run(self) -> None:
        while (batch := self._take()) is not None:
            self._do(batch, _Batch.copy_on_one_core)
        with self._lock:
            self._lock.wait_for(lambda: self._left == 0)
        self._on_end(self._error)

    def _take(self) -> _Batch | None:
        with self._lock:
            if self._next == len(self._batches):
                return None
            self._next += 1
            return self._batches[self._next - 1]

    def _do(self, batch: _Batch, copy: Callable[[_Batch], None]) -> None:
        error: CheckpointError | None = None
        try:
            if self._error is None:
                with torch.no_grad():
                    copy(batch)
                    batch.check()
        except CheckpointError as torn:
            error = torn
        except Exception as unforeseen:
            error = CheckpointError(f"the background copy failed: {unforeseen!r}")
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            self._lock.notify_all()


def lay_tracks(moves: Sequence[Move]) -> list[Track]:
    """Cut moves into tracks of some 16 MiB, or many small tensors, in order."""
    cut: list[list[Move]] = []
    room = 0
    for move in moves:
        size = move.source.numel() * move.source.element_size()
        if not cut or size > room or len(cut[-1]) == BATCH_MOVES_MAX:
            cut.append([])
            room = BATCH_BYTES
        cut[-1].append(move)
        room -= size
    return [Track(part) for part in cut]
