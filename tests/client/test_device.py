"""The copy from a device: exact, ordered by events alone, loud when something moves under it.

Everything but the last tests runs on the CPU, where torch has streams and events that do nothing: the very code that a GPU
runs, except that its copies are done when they are enqueued.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from holdfast import Checkpointer, SaveWarning
from holdfast.stage import cuda_copy
from holdfast.stage.background_copy import BackgroundCopy, lay_tracks
from holdfast.stage.copy_plans import CopyPlans
from holdfast.stage.cuda_copy import DeviceCopy, Lane
from holdfast.stage.slots import Slots
from holdfast.stage.staging import Copy
from holdfast_formats.errors import TornSnapshot
from holdfast_formats.staging import arena
from tests.client.stage.test_background_copy import (
    Ended,
    by_data,
    by_foreach,
    by_foreach_step,
    by_fused_step,
    by_numpy,
    moves_of,
)
from tests.daemons import RunningDaemon, running
from tests.kit.daemons import own_daemon

CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


daemon = own_daemon(listen="none")


@pytest.fixture
def as_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies CPU memory in the way of device memory."""
    monkeypatch.setattr(cuda_copy, "KINDS", frozenset({"cpu"}))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 8 KiB, so that small tensors are cut as well."""
    monkeypatch.setattr(cuda_copy, "CHUNK_BYTES", 2**13)


class Laid:
    """Tensors, a slot full of ones, and the way from one into the other."""

    def __init__(self, *tensors: torch.Tensor, restless: bool = False) -> None:
        self.tensors = [tensor.detach() for tensor in tensors]
        self.offsets, end = [], 0
        for tensor in self.tensors:
            self.offsets.append(-(-end // 64) * 64)
            end = self.offsets[-1] + tensor.numel() * tensor.element_size()
        self.slot = bytearray(b"\xff" * max(end, 1))
        places = zip(self.tensors, self.offsets, strict=True)
        copies = [Copy(f"t{i}", tensor, offset, restless) for i, (tensor, offset) in enumerate(places)]
        self.ways = CopyPlans()._lay(copies, memoryview(self.slot))

    @property
    def lane(self) -> Lane:
        (lane,) = self.ways.lanes
        return lane

    def staged(self) -> list[bytes]:
        sizes = [tensor.numel() * tensor.element_size() for tensor in self.tensors]
        return [bytes(self.slot[at : at + size]) for at, size in zip(self.offsets, sizes, strict=True)]


def contents(tensors: list[torch.Tensor]) -> list[bytes]:
    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
    return [tensor.detach().view(unsigned[tensor.element_size()]).contiguous().numpy().tobytes() for tensor in tensors]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64]),
            st.lists(st.integers(1, 60), max_size=3),
            st.sampled_from(["plain", "transposed", "strided", "unaligned"]),
        ),
        min_size=1,
        max_size=6,
    ),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_what_does_not_move_is_copied_exactly(kinds: list, restless: bool, seed: int) -> None:
    """Tensors of every width, shape and stride arrive bit for bit, small ones and those of many chunks."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for dtype, shape, form in kinds:
        tensor = torch.randint(0, 100, [3, *shape], generator=generator).to(dtype)[1 if form == "unaligned" else 0 :]
        tensor = tensor.view(-1)[1:] if form == "unaligned" else tensor
        tensors.append(
            tensor.transpose(0, -1) if form == "transposed" else tensor.view(-1)[::2] if form == "strided" else tensor
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_copy, "KINDS", frozenset({"cpu"}))
        patch.setattr(cuda_copy, "CHUNK_BYTES", 2**12)
        laid = Laid(*tensors, restless=restless)
        assert not laid.ways.small and not laid.ways.at_once and not laid.ways.tracks
        for _ in range(2):  # a lane is used again and again
            copy = DeviceCopy(laid.lane)
            copy.begin()
            copy.do()
            copy.finish()
            assert laid.staged() == contents(tensors)
            laid.slot[:] = b"\xff" * len(laid.slot)


@pytest.mark.usefixtures("as_device", "small_chunks")
@pytest.mark.parametrize("change", [by_foreach, by_data, by_numpy, by_fused_step, by_foreach_step])
@pytest.mark.parametrize("shape", [(2000,), (64, 33), (30, 40, 5)])
@pytest.mark.parametrize("strided", [False, True])
def test_what_moves_before_it_is_copied_is_named(change: Callable, shape: tuple[int, ...], strided: bool) -> None:
    """foreach, fused, `.data` and numpy writes between the call and the copy fail it, and name the tensor alone."""
    still, moving = torch.randn(5000), nn.Parameter(torch.randn(shape))
    laid, ended = Laid(still, moving.transpose(0, -1) if strided else moving), Ended()
    copy = DeviceCopy(laid.lane)
    copy.begin()
    with torch.no_grad() if change is not by_fused_step else torch.enable_grad():
        change(moving)
    background = BackgroundCopy((), lambda error: ended(cuda_copy.finish([copy], error)), [copy])
    background.start()
    background.join()
    assert isinstance(ended.error, TornSnapshot) and ended.error.members["tensors"] == ["t1"]


@pytest.mark.usefixtures("as_device", "small_chunks")
@pytest.mark.parametrize("change", [by_foreach, by_data])
def test_what_moves_after_the_fence_is_nothing_to_us(change: Callable) -> None:
    """Whoever fenced may change everything, though nobody has waited for the end of the copies yet."""
    tensors = [torch.randn(5000), torch.randn(3)]
    laid, before = Laid(*tensors), contents(tensors)
    copy = DeviceCopy(laid.lane)
    copy.begin()
    copy.do()
    copy.fence()
    for tensor in tensors:
        change(tensor)
    copy.finish()
    assert laid.staged() == before


@pytest.mark.usefixtures("as_device")
def test_small_and_restless_tensors_are_taken_at_the_call() -> None:
    """A few bytes, and what training may change at any time, are on their way when `begin` returns."""
    few, buffer = [torch.randn(3), torch.randn(())], torch.randn(3000)
    small, restless = Laid(*few), Laid(buffer, restless=True)
    before = [contents(few), contents([buffer])]
    copies = [DeviceCopy(small.lane), DeviceCopy(restless.lane)]
    for copy in copies:
        copy.begin()
    for tensor in (*few, buffer):
        tensor.add_(1)
    for copy in copies:
        copy.do()
        copy.finish()
    assert [small.staged(), restless.staged()] == before


class Diary:
    """What streams and events were asked for, in order, and by which stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entries: list[str] = []
        diary, numbers = self, iter("abcdef")

        class Stream(torch.cpu.Stream):
            def wait_event(self, event: Event) -> None:
                diary.entries.append(f"{diary.name(self)} waits for {event.name}")

        class Event(torch.cpu.Event):
            def __init__(self) -> None:
                self.name = next(numbers)

            def record(self, stream: torch.cpu.Stream | None = None) -> None:
                diary.entries.append(f"{diary.name(stream)} records {self.name}")

            def synchronize(self) -> None:
                diary.entries.append(f"host waits for {self.name}")

        self.current = Stream()
        monkeypatch.setattr(torch.cpu, "Stream", Stream)
        monkeypatch.setattr(torch.cpu, "Event", Event)
        monkeypatch.setattr(torch.cpu, "_current_stream", self.current)
        monkeypatch.setattr(torch.cpu, "synchronize", lambda *_: self.entries.append("host waits for all"))

    def name(self, stream: object) -> str:
        return "training" if stream is self.current else "side"


@pytest.mark.usefixtures("as_device")
def test_everybody_waits_for_events_and_nobody_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The side stream waits for the moment of the save only, the training for the copies, the host for their end."""
    diary = Diary(monkeypatch)
    assert torch.cpu.current_stream() is diary.current
    laid = Laid(torch.randn(5000))
    copied_on = []
    enqueue = torch._foreach_copy_
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda *a, **k: (copied_on.append(diary.name(torch.cpu.current_stream())), enqueue(*a, **k))
    )
    copy = DeviceCopy(laid.lane)
    copy.begin()
    copy.do()
    copy.fence()
    copy.finish()
    copy.fence()  # there is nothing to wait for any more
    assert copied_on == ["side"]
    assert diary.entries == [
        "training records a",
        "side waits for a",
        "side records b",
        "training waits for b",
        "host waits for b",
    ]


@pytest.mark.usefixtures("as_device")
def test_a_copy_that_fails_ends_the_save_and_not_the_training() -> None:
    """An unforeseen failure while enqueuing is an error at the end, after what was enqueued is done; the fence is silent."""
    laid, ended = Laid(torch.randn(5000)), Ended()
    lane = laid.lane
    lane._behind = [move._replace(target=torch.empty(7)) for move in lane._behind]
    copy = DeviceCopy(lane)
    copy.begin()
    background = BackgroundCopy((), lambda error: ended(cuda_copy.finish([copy], error)), [copy])
    background.fence()
    copy.fence()
    background.start()
    background.join()
    assert ended.error is not None and "background copy failed" in ended.error.detail
    assert copy._finished, "the slot must not be given back before"


@pytest.mark.usefixtures("as_device")
def test_32_kib_in_a_row_never_change_unseen() -> None:
    """Wherever they stand in chunks of any length, written past torch."""
    table = torch.zeros(5_000_001)
    laid = Laid(table)
    for first in np.random.default_rng(3).integers(0, len(table) - 2**13, 10).tolist():
        copy = DeviceCopy(laid.lane)
        copy.begin()
        table.numpy()[first : first + 2**13] += 1
        copy.do()
        with pytest.raises(TornSnapshot):
            copy.finish()


@pytest.mark.usefixtures("as_device")
def test_a_full_check_copies_all_before_it_returns() -> None:
    """Whatever changes afterwards is not in the slot, and nothing is torn."""
    table = torch.randn(100_000)
    laid, before = Laid(table), contents([table])
    copy = DeviceCopy(laid.lane)
    copy.begin(full=True)
    table.add_(1)
    copy.do()
    copy.fence()
    copy.finish()
    assert laid.staged() == before


@pytest.mark.parametrize("moving", ["nothing", "beside", "behind"])
def test_memory_and_device_memory_share_a_save(monkeypatch: pytest.MonkeyPatch, moving: str) -> None:
    """One end for both: either being torn tears the save, by its own names, and not before the device is done."""
    beside, behind = torch.randn(5000), torch.randn(5000)
    beside_moves, ended = moves_of(beside), Ended()
    monkeypatch.setattr(cuda_copy, "KINDS", frozenset({"cpu"}))
    laid, before = Laid(torch.zeros(5000), behind), contents([behind])
    copy = DeviceCopy(laid.lane)
    copy.begin()
    background = BackgroundCopy(lay_tracks(beside_moves), lambda error: ended(cuda_copy.finish([copy], error)), [copy])
    if moving != "nothing":
        {"beside": beside, "behind": behind}[moving].add_(1)
    background.start()
    background.fence()
    copy.fence()
    background.join()
    assert copy._finished
    if moving == "nothing":
        assert ended.error is None and laid.staged()[1:] == before
        assert torch.equal(beside_moves[0].source, beside_moves[0].target)
    else:
        assert isinstance(ended.error, TornSnapshot)
        assert ended.error.members["tensors"] == [{"beside": "t0", "behind": "t1"}[moving]]


def state_on(home: torch.device, **options: object) -> dict:
    """A model with batch statistics on a device, an optimizer that has stepped, EMA copies, and tensors on the CPU."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 500), nn.BatchNorm1d(500), nn.Linear(500, 300)).to(home)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    step(model, optim)
    ema = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return {"model": model, "optim": optim, "ema": ema, "counts": torch.arange(3000), "strided": torch.arange(20.0)[::2]}


def step(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    model(torch.ones(4, 300, device=next(model.parameters()).device)).sum().backward()
    optim.step()


def copied(state: dict) -> dict[str, torch.Tensor]:
    """All tensors of such a state, copied."""
    found = {f"model/{name}": tensor for name, tensor in state["model"].state_dict().items()}
    found |= {f"ema/{name}": tensor for name, tensor in state["ema"].items()}
    for number, kept in enumerate(state["optim"].state.values()):
        found |= {f"optim/{number}/{key}": tensor for key, tensor in kept.items()}
    found |= {name: state[name] for name in ("counts", "strided")}
    return {name: tensor.detach().cpu().clone() for name, tensor in found.items()}


def check_steps(daemon: RunningDaemon, run: str, home: torch.device, options: dict) -> None:
    """Saves with a step right behind each; the last one restored is what was there when it was called."""
    state = state_on(home, **options)
    with Checkpointer(run, state, at=daemon.socket) as checkpointer:
        for number in range(1, 4):
            before = copied(state)
            ticket = checkpointer.save(number, wait="staged" if number == 2 else None)
            step(state["model"], state["optim"])
            ticket.result(180)
        assert checkpointer.restore() == 3
    after = copied(state)
    assert after.keys() == before.keys() and all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.usefixtures("as_device", "small_chunks")
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}])
def test_saves_end_to_end_in_the_way_of_a_device(daemon: RunningDaemon, options: dict) -> None:
    """A step right behind a save, which changes parameters, moments and batch statistics, is not in the checkpoint."""
    check_steps(daemon, f"steps-{'-'.join(options)}", CPU, options)


@pytest.mark.usefixtures("as_device")
def test_a_torn_save_fails_by_name_and_the_next_one_is_fine(daemon: RunningDaemon) -> None:
    """What changes without a fence ends its save; slot and training are free for the next."""
    state = state_on(CPU)
    with Checkpointer("torn", state, at=daemon.socket) as checkpointer:
        task_error = None
        for number in range(1, 20):
            ticket = checkpointer.save(number)
            for tensor in state["ema"].values():
                tensor.add_(1)
            try:
                ticket.result(180)
            except TornSnapshot as error:
                task_error = error
                break
        assert task_error is not None and "ema/" in task_error.detail
        with pytest.warns(SaveWarning, match="torn-snapshot"):
            checkpointer.save(30, wait="durable")


def test_slots_that_cannot_be_page_locked_are_used_as_they_are(
    daemon: RunningDaemon, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a driver it is tried once, said once, and saves go on."""
    monkeypatch.setattr(torch.cuda, "cudart", refused)
    with Checkpointer("pageable", {"w": torch.randn(5000)}, at=daemon.socket) as checkpointer:
        checkpointer.prepare(wait=True)
        slots = checkpointer._reservation.slots
        assert slots is not None and slots.may_pin, "nothing is locked for a state without GPUs"
        with caplog.at_level(logging.WARNING, "holdfast"):
            for _ in range(2):
                cuda_copy.pin(slots, 0, [torch.device("cuda", 0)])
        assert not slots.may_pin and len(caplog.records) == 1 and "cannot be page-locked" in caplog.text
        checkpointer.save(1, wait="durable")


def refused() -> None:
    raise RuntimeError("no driver")


class Runtime:
    """The two calls of the CUDA runtime that page-lock memory, written down."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 1
        self.calls.append(("lock", address, size))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unlock", address, 0))
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """In place of the CUDA runtime."""
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    return runtime


GPUS = [torch.device("cuda", 0)]


def place(slots: Slots, slot: int) -> int:
    """The address of a slot."""
    return torch.frombuffer(slots.memory, dtype=torch.uint8).data_ptr() + slots.geometry.header_offset(slot)


def test_slots_are_page_locked_whole_and_once_and_unlocked_before_they_go(daemon: RunningDaemon, runtime: Runtime) -> None:
    """Each slot is locked from its first byte on and unlocked at that address: when it is outgrown, and at the end."""
    state, expected = {"w": {"0": torch.randn(5000)}}, []
    with Checkpointer("locked", state, at=daemon.socket) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, wait="durable")
            slots = checkpointer._reservation.slots
            assert slots is not None
            for _ in range(2):
                cuda_copy.pin(slots, 1, GPUS)
            assert runtime.calls == [*expected, ("lock", place(slots, 1), slots.geometry.slot_bytes)]
            expected = [*runtime.calls, ("unlock", place(slots, 1), 0)]
            state["w"][str(step)] = torch.randn(500_000)
    assert runtime.calls == expected and not slots.may_pin
    cuda_copy.pin(slots, 1, GPUS)
    assert runtime.calls == expected, "what is given back is not locked"


def test_a_slot_whose_memory_was_returned_is_unlocked_before_the_next_save(daemon: RunningDaemon, runtime: Runtime) -> None:
    """A device writes to the pages that were locked, which are no longer the slot's: it is locked again before that."""
    with Checkpointer("emptied", {"w": torch.randn(5000)}, at=daemon.socket) as checkpointer:
        checkpointer.save(1, wait="durable")
        slots = checkpointer._reservation.slots
        assert slots is not None
        for slot in (0, 1):
            cuda_copy.pin(slots, slot, GPUS)
        arena.mark_emptied(slots.memory, slots.geometry, 1)
        before = len(runtime.calls)
        checkpointer.save(2, wait="durable")
        assert runtime.calls[before:] == [("unlock", place(slots, 1), 0)]
        cuda_copy.pin(slots, 1, GPUS)
        assert runtime.calls[before + 1 :] == [("lock", place(slots, 1), slots.geometry.slot_bytes)]


def test_slots_that_nobody_has_any_more_are_unlocked(daemon: RunningDaemon, runtime: Runtime) -> None:
    """Without `close()`, too, pages are unlocked before the memory is unmapped."""
    with Checkpointer("lost", {"w": torch.randn(5000)}, at=daemon.socket) as checkpointer:
        checkpointer.save(1, wait="durable")
        slots = Slots(checkpointer._session._link, 1, 2**16, 2**16)
        cuda_copy.pin(slots, 0, GPUS)
        del slots
        gc.collect()
        assert [kind for kind, *_ in runtime.calls] == ["lock", "unlock"]


def sleep(home: torch.device, seconds: float) -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(int(seconds * 1e9))  # cycles: at 1 to 2 GHz at least half as long


@needs_cuda
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"capturable": True}])
def test_cuda_steps_right_behind_a_save_wait_on_the_device(daemon: RunningDaemon, options: dict) -> None:
    """With a real device, and tensors on the CPU beside it, every tensor is bit for bit that of the call."""
    check_steps(daemon, f"cuda-{'-'.join(options)}", torch.device("cuda", 0), options)


@needs_cuda
def test_cuda_save_and_fence_do_not_wait_for_the_device(daemon: RunningDaemon) -> None:
    """Both return while the current stream is still at work on what came before; the host waits for the ticket only."""
    home = torch.device("cuda", 0)
    model = nn.Linear(2, 1, device=home)
    state = {"w": torch.randn(2**24, device=home), "model": model, "optim": torch.optim.SGD(model.parameters(), lr=1.0)}
    with Checkpointer("cuda-async", state, at=daemon.socket, fenced=True) as checkpointer:
        checkpointer.prepare(wait=True)
        checkpointer.save(1, wait="durable")
        expected = state["w"].cpu()
        sleep(home, 1.0)
        ticket = checkpointer.save(2)
        checkpointer.fence()
        state["w"].zero_()
        assert not torch.cuda.current_stream(home).query(), "somebody waited for the device"
        ticket.result(180)
        checkpointer.restore(2)
    assert torch.equal(state["w"].cpu(), expected)


@needs_cuda
@pytest.mark.parametrize("change", [by_data, by_foreach])
def test_cuda_writes_under_the_copy_are_noticed(daemon: RunningDaemon, change: Callable) -> None:
    """What is enqueued after `save()` without a fence is torn, by name, or was too late to matter."""
    state = {"w": torch.zeros(2**27, device="cuda")}
    torn = 0
    with Checkpointer(f"cuda-torn-{change.__name__}", state, at=daemon.socket, fenced=True) as checkpointer:
        checkpointer.prepare(wait=True)
        for number in range(1, 6):
            before = state["w"].cpu()
            ticket = checkpointer.save(number)
            change(state["w"])
            try:
                ticket.result(180)
            except TornSnapshot as error:
                torn += 1
                assert error.members["tensors"] == ["extra/w"]
                break
            checkpointer.restore(number)
            assert torch.equal(state["w"].cpu(), before)
        assert torn, "the write never met the copy, which makes this test void"
        with pytest.warns(SaveWarning):
            checkpointer.save(99, wait="durable")


@needs_cuda
def test_cuda_steps_can_be_captured_while_a_save_is_on_its_way(daemon: RunningDaemon) -> None:
    """A hook that fences while a graph records neither breaks the recording nor waits; `fence()` before its replay does."""
    home = torch.device("cuda", 0)
    state = state_on(home, capturable=True)
    with Checkpointer("cuda-graph", state, at=daemon.socket) as checkpointer:
        checkpointer.prepare(wait=True)
        step(state["model"], state["optim"])
        graph, before = torch.cuda.CUDAGraph(), copied(state)
        torch.cuda.synchronize()
        ticket = checkpointer.save(1)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            state["optim"].step()
        checkpointer.fence()
        graph.replay()
        ticket.result(180)
        checkpointer.restore(1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in copied(state).items())


@needs_cuda
def test_cuda_slots_are_page_locked_until_they_are_gone(tmp_path: Path) -> None:
    """Prepared slots are page-locked, and are no longer once the checkpointer is closed."""
    with running(tmp_path / "root") as daemon:
        checkpointer = Checkpointer("locked", {"w": torch.zeros(2**20, device="cuda")}, at=daemon.socket)
        checkpointer.prepare(wait=True)
        slots = checkpointer._reservation.slots
        assert slots is not None and slots.pins.keys() == {0}
        memory = torch.frombuffer(slots.data(0), dtype=torch.uint8)
        assert memory.is_pinned()
        checkpointer.save(1, wait="durable")
        checkpointer.close()
        assert not memory.is_pinned()


@needs_cuda
def test_cuda_streams_and_events_are_what_the_stand_ins_are() -> None:
    """Nothing of what the CPU tests use is missing where a device is."""
    side = cuda_copy.SideStream(torch.device("cuda", 0))
    with side.selected():
        assert side.current() == side.stream
    event = side.event()
    event.record(side.stream)
    side.current().wait_event(event)
    event.synchronize()
    assert not side.capturing() and side.host_buffer(8).is_pinned() and np.array_equal(side.host_buffer(0).numpy(), [])
