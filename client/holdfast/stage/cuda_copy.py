"""Copies device memory into a slot on a stream of its own, while the streams of the training compute on.

A save leaves three things on the device, and waits for none of them:

    current stream   what came before, copies of what is restless, samples, *ready*, forward, backward, wait for *end*, step
    side stream      wait for *ready*, chunks of all else, samples, *end*

The side stream never waits for anything that was enqueued after `save()`. Ranks wait for each other in collectives: a seal
that depended on later work could wait for a rank that waits for this very save.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.stage.background_copy import Move, torn, version
from holdfast.stage.slots import Pin, Slots
from holdfast.stage.staging import ALIGNMENT_BYTES
from holdfast.tensors.leaves import Leaf
from holdfast.threads import own_threads
from holdfast_formats.errors import CheckpointError

log = logging.getLogger(__name__)

KINDS = frozenset({"cuda"})  # devices that are copied in the background; others are waited for in `save()`
CHUNK_BYTES = 16 * 2**20  # the longest wait of another copy to the host, such as that of a loss
CHUNKS_A_CALL = 64  # torch enqueues so many without the interpreter's lock
WORD_BYTES = 8
SAMPLE_WORDS = 16  # of a chunk, at least, where its memory is contiguous
STRETCH_BYTES = 2**14  # a word for so many bytes, at most: all of 32 KiB that changed is seen
SAMPLES_A_DIMENSION = {1: 16, 2: 4, 3: 3}  # else 2, where it is not contiguous: some sixteen elements
PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device of this process


class SideStream:
    """A device's side stream and its events, reused by every save. torch's API is the same for every device, with
    no-ops for the CPU.
    """

    def __init__(self, home: torch.device) -> None:
        self.home, self._is_cuda = home, home.type == "cuda"
        self._module: Any = torch.get_device_module(home)
        # CUDA's default priority is its lowest: if both have kernels to run, the training's do not wait for ours.
        self.stream = self._module.Stream(device=home) if self._is_cuda else self._module.Stream()

    def event(self) -> Any:
        """A new event. Waiting for it sleeps: CUDA's default would keep a core busy."""
        return self._module.Event(blocking=True) if self._is_cuda else self._module.Event()

    def current(self) -> Any:
        return self._module.current_stream(self.home)

    def capturing(self) -> bool:
        """Whether the current stream captures a graph: work enqueued now runs at the replay, and must not wait."""
        return self._is_cuda and bool(self._module.is_current_stream_capturing())

    def selected(self) -> Any:
        return self._module.stream(self.stream)

    def enter_thread(self) -> None:
        """Make this the device of one of our threads; otherwise CUDA would also initialise device 0."""
        self._module.set_device(self.home)

    def host_buffer(self, *shape: int) -> torch.Tensor:
        """Host memory for copies without waiting. It is allocated once, because page-locking memory may stall a device."""
        return torch.empty(shape, dtype=torch.uint8, device="cpu", pin_memory=self._is_cuda)


class Bundle(NamedTuple):
    """Small tensors that follow one another in the slot, with the gap in bytes before each: gathered and copied as one."""

    sources: list[torch.Tensor]
    gaps: list[int]
    target: torch.Tensor

    def parts(self, zeros: torch.Tensor) -> list[torch.Tensor]:
        pairs = zip(self.gaps, self.sources, strict=True)
        return [part for gap, source in pairs for part in ((zeros[:gap], source) if gap else (source,))]


class DeviceLoad(NamedTuple):
    """The copies from one device into one slot: small tensors with their offsets, restless ones, settled ones."""

    small: list[tuple[int, Move]]
    at_once: list[Move]
    behind: list[Move]


class _Samples:
    """Sampled words of every chunk: views of the live memory and of the slot, and host memory for the noted values.

    They are at even distances from a place that is drawn once per chunk: making views for each save would cost too much.
    """

    def __init__(self, chunks: Sequence[Move], side: SideStream) -> None:
        flat = [chunk for chunk in chunks if _has_windows(chunk)]
        strided = [chunk for chunk in chunks if not _has_windows(chunk)]
        self.names = [chunk.name for chunk in (*flat, *strided)]
        begins = [_begin(chunk.source) for chunk in flat]
        self._windows = [_windows(chunk.source, begin) for chunk, begin in zip(flat, begins, strict=True)]
        self._elements = [chunk.source[_few(chunk.source)] for chunk in strided]
        self._counts = [view.numel() * view.element_size() for view in (*self._windows, *self._elements)]
        self._copied = [_windows(chunk.target, begin).numpy() for chunk, begin in zip(flat, begins, strict=True)]
        self._copied += [chunk.target[_few(chunk.target)].numpy() for chunk in strided]
        self._before, self._after = side.host_buffer(sum(self._counts)), side.host_buffer(sum(self._counts))

    def take(self, after: bool) -> None:
        """Enqueue on the current stream: note the present words of the live memory."""
        parts = [torch.cat(self._windows).view(-1)] if self._windows else []
        plain = (view.clone(memory_format=torch.contiguous_format) for view in self._elements)
        parts += [elements.view(-1).view(torch.uint8) for elements in plain]
        if parts:
            (self._after if after else self._before).copy_(torch.cat(parts), non_blocking=True)

    def changed(self) -> set[str]:
        """Names of tensors whose words changed, in live memory or in the slot. Call it when all enqueued work is done."""
        if not self.names:
            return set()
        before, after = self._before.numpy(), self._after.numpy()
        copied = np.concatenate([np.ascontiguousarray(view).reshape(-1).view(np.uint8) for view in self._copied])
        if np.array_equal(before, after) and np.array_equal(before, copied):
            return set()
        different: NDArray[np.bool_] = (before != after) | (before != copied)
        ends = np.cumsum(self._counts)
        return {
            name for name, end, size in zip(self.names, ends, self._counts, strict=True) if different[end - size : end].any()
        }


class Lane:
    """The way from one device into one slot, with all the views needed for it: made once, used by every save."""

    def __init__(self, side: SideStream, load: DeviceLoad, data: memoryview) -> None:
        """`data` are the slot's bytes, into which the targets of all moves point."""
        self.side = side
        self._bundles = list(_bundles(load.small, torch.frombuffer(data, dtype=torch.uint8)))
        self._at_once = [chunk for move in load.at_once for chunk in _chunks(move)]
        self._behind = [chunk for move in load.behind for chunk in _chunks(move)]
        self._watched = load.behind
        self.samples = _Samples(self._behind, side)
        self._gathered: list[list[torch.Tensor]] = []

    def copy_at_once(self) -> None:
        """Enqueue on the current stream the copies of everything that is small or that training may change at any time."""
        if not self._gathered and self._bundles:  # the zeros are made on the stream that reads them first
            zeros = torch.zeros(ALIGNMENT_BYTES, dtype=torch.uint8, device=self.side.home)
            self._gathered = [bundle.parts(zeros) for bundle in self._bundles]
        for bundle, parts in zip(self._bundles, self._gathered, strict=True):
            bundle.target.copy_(torch.cat(parts), non_blocking=True)
        _enqueue(self._at_once)

    def copy_behind(self) -> None:
        """Enqueue on the current stream the copies of what only an optimizer's step changes."""
        _enqueue(self._behind)

    def versions(self) -> list[int]:
        return [version(move.source) for move in self._watched]

    def moved(self, before: Sequence[int], now: Sequence[int]) -> set[str]:
        return {move.name for move, a, b in zip(self._watched, before, now, strict=True) if a != b}


class DeviceCopy:
    """The copy of one lane for one save: `begin()`, then `do()` and `finish()` in background threads; `fence()` at any
    time.

    The caching allocator does not know of the side stream, and need not: the lane keeps every tensor alive, so no
    memory is reused before `finish()`. Gathered memory is freed on the stream that made and used it.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane, self._side = lane, lane.side
        self._ready, self._end = self._side.event(), self._side.event()
        self._before: list[int] = []
        self._now: dict[str, list[int]] = {}
        self._enqueued = self._finished = self._copied = False

    def begin(self, full: bool = False) -> None:
        """Enqueue on the current stream what must be copied at this moment; with `full` copy everything, and wait for it."""
        with torch.no_grad():
            self._lane.copy_at_once()
            self._lane.samples.take(after=False)
            if full:
                self._lane.copy_behind()
                self._lane.samples.take(after=True)
        self._ready.record(self._side.current())
        self._before = self._lane.versions()
        if full:
            self._ready.synchronize()
            self._note_versions()
            self._copied = True

    def do(self) -> None:
        """Enqueue the rest on the side stream. It may block if the slot is not page-locked."""
        if self._copied:
            return
        self._side.enter_thread()
        with torch.no_grad(), self._side.selected():
            try:
                self._side.stream.wait_event(self._ready)
                self._lane.copy_behind()
                # Taken after the copies, before the step: a write during the copy has happened by now.
                self._lane.samples.take(after=True)
            finally:
                self._end.record(self._side.stream)
                self._enqueued = True

    def fence(self) -> None:
        """Make work enqueued from now on wait for the copies, without blocking the host. Call it after `do()`."""
        self._note_versions()
        if not self._finished and not self._side.capturing():
            self._side.current().wait_event(self._end if self._enqueued else self._ready)

    def finish(self) -> None:
        """Wait until the slot has everything; `TornSnapshot` if the copy differs from the state at the call of `save()`."""
        self._side.enter_thread()
        (self._end if self._enqueued else self._ready).synchronize()
        self._finished = True
        now = self._note_versions()
        changed = self._lane.moved(self._before, now)
        if self._enqueued or self._copied:
            changed |= self._lane.samples.changed()
        if changed:
            raise torn(sorted(changed))

    def settle(self) -> None:
        """After a failure, wait until no copy into the slot is running, because the slot will be leased again."""
        with suppress(RuntimeError):  # a device that has failed writes nothing either
            event = self._side.event()
            event.record(self._side.current())
            event.synchronize()

    def _note_versions(self) -> list[int]:
        # In one step, without a lock: a signal handler may fence, too, in the thread that it interrupted here.
        return self._now.get("now") or self._now.setdefault("now", self._lane.versions())


def finish(copies: Iterable[DeviceCopy], error: CheckpointError | None) -> CheckpointError | None:
    """Wait for all copies, even after a failure, because they must not write the slot later; return the first error."""
    for copy in copies:
        try:
            with own_threads.computing():
                copy.finish()
        except CheckpointError as torn_copy:
            error = error or torn_copy
        except Exception as unforeseen:
            error = error or CheckpointError(f"the copy from the GPU failed: {unforeseen!r}")
    return error


def homes(leaves: Iterable[Leaf]) -> tuple[torch.device, ...]:
    devices = dict.fromkeys(piece.tensor.device for leaf in leaves for piece in leaf.pieces)
    return tuple(home for home in devices if home.type in KINDS)


def pin(slots: Slots, slot: int, devices: Sequence[torch.device]) -> None:
    """Page-lock a slot until the slots are freed, so that CUDA devices write into it directly.

    Without it copies are correct, but slower, and block the thread that enqueues them.
    """
    cuda = [home for home in devices if home.type == "cuda"]
    if not cuda:
        return
    with slots.pinning:  # a second thread waits here and finds it done
        if slot in slots.pins or not slots.may_pin:
            return
        begin, size, emptied = slots.geometry.header_offset(slot), slots.geometry.slot_bytes, slots.emptied(slot)
        address = torch.frombuffer(slots.memory, dtype=torch.uint8).data_ptr() + begin
        problem = _cudart(cuda[0], "cudaHostRegister", address, size, PORTABLE)
        if problem:
            slots.may_pin = False
            log.warning("the slots cannot be page-locked; copies from the GPU are slower: %s", problem)
            return
        # A thread that fills a slot keeps the slots alive, and they the mapping: no copy is under way when this is called.
        unlock = weakref.finalize(slots, _unlock, cuda[0], address)
        unlock.atexit = False  # at exit the driver does it
        slots.pins[slot] = Pin(emptied, unlock)


def unpin(slots: Slots) -> None:
    """Unlock the pages for good, so that the daemon can reclaim them. No copy into a slot may be running."""
    with slots.pinning:
        slots.may_pin = False
        for pinned in slots.pins.values():
            pinned.unlock()
        slots.pins.clear()


def unpin_emptied(slots: Slots) -> None:
    """Unlock slots whose memory was returned to the system since: a device would write into pages that are no longer
    theirs. No copy into a slot may be running.
    """
    with slots.pinning:
        for slot, pinned in list(slots.pins.items()):
            if pinned.emptied != slots.emptied(slot):
                slots.pins.pop(slot).unlock()


def _unlock(home: torch.device, address: int) -> None:
    problem = _cudart(home, "cudaHostUnregister", address)
    if problem:
        log.warning("could not unlock slots that are no longer used: %s", problem)


def _cudart(home: torch.device, name: str, *arguments: int) -> str:
    """Call the CUDA runtime on a device; return its error message, empty if there is none."""
    try:
        with own_threads.computing(), torch.cuda.device(home):
            status = int(getattr(torch.cuda.cudart(), name)(*arguments))  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as failure:  # no driver, or a build without CUDA
        return str(failure)
    return f"{name} returned {status}" if status else ""


def _enqueue(chunks: Sequence[Move]) -> None:
    for start in range(0, len(chunks), CHUNKS_A_CALL):
        some = chunks[start : start + CHUNKS_A_CALL]
        torch._foreach_copy_([move.target for move in some], [move.source for move in some], non_blocking=True)


def _chunks(move: Move) -> list[Move]:
    parts = -(-move.nbytes // CHUNK_BYTES)
    if parts <= 1:
        return [move]
    rows = -(-len(move.source) // parts)
    if move.source.dim() == 1:
        rows = -(-rows // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    pairs = zip(torch.split(move.source, rows), torch.split(move.target, rows), strict=True)
    return [Move(move.name, source, target) for source, target in pairs]


def _has_windows(chunk: Move) -> bool:
    octets = chunk.source.dtype is torch.uint8 and chunk.source.dim() == 1 and chunk.source.is_contiguous()
    return octets and chunk.nbytes >= SAMPLE_WORDS * WORD_BYTES


def _step(octets: torch.Tensor) -> int:
    return min(STRETCH_BYTES, len(octets) // SAMPLE_WORDS)


def _begin(octets: torch.Tensor) -> int:
    """Random offset of the first sampled word; leaves torch's global random generator untouched."""
    return int.from_bytes(os.urandom(4), "little") % (_step(octets) - WORD_BYTES + 1)


def _windows(octets: torch.Tensor, begin: int) -> torch.Tensor:
    step = _step(octets)
    words = (len(octets) - begin - WORD_BYTES) // step + 1
    return octets.as_strided((words, WORD_BYTES), (step, 1), octets.storage_offset() + begin)


def _few(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Indices of about sixteen elements of non-contiguous memory."""
    count = SAMPLES_A_DIMENSION.get(tensor.dim(), 2)
    return tuple(slice(0, None, max(-(-size // count), 1)) for size in tensor.shape)


def _bundles(small: Sequence[tuple[int, Move]], slot: torch.Tensor) -> Iterator[Bundle]:
    sources: list[torch.Tensor] = []
    gaps: list[int] = []
    first = end = 0
    for offset, move in small:
        # No tensor of another device fits into a gap that is smaller than an alignment.
        if sources and (not 0 <= offset - end < ALIGNMENT_BYTES or offset + move.nbytes - first > CHUNK_BYTES):
            yield Bundle(sources, gaps, slot[first:end])
            sources, gaps = [], []
        if not sources:
            first = end = offset
        sources.append(move.source)
        gaps.append(offset - end)
        end = offset + move.nbytes
    if sources:
        yield Bundle(sources, gaps, slot[first:end])
