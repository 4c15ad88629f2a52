"""The background copy: exact when nothing moves, loud when something does, whoever moved it and however."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from holdfast import Checkpointer, SaveWarning
from holdfast.memory import native_copy
from holdfast.stage.background_copy import BackgroundCopy, Move, lay_tracks
from holdfast_formats.errors import CheckpointError, InvalidRequest, TornSnapshot
from tests.daemons import RunningDaemon
from tests.kit.daemons import own_daemon

daemon = own_daemon(listen="none")


class Ended:
    """Collects what a copy said at its end."""

    def __init__(self) -> None:
        self.error: CheckpointError | None = None
        self.event = threading.Event()

    def __call__(self, error: CheckpointError | None) -> None:
        self.error = error
        self.event.set()


def moves_of(*tensors: torch.Tensor) -> list[Move]:
    """Each tensor, as unsigned integers, with a target of its own."""
    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
    raws = [t.detach().view(unsigned[t.element_size()]) for t in tensors]
    return [Move(f"t{i}", raw, torch.empty(raw.shape, dtype=raw.dtype)) for i, raw in enumerate(raws)]


@given(
    st.lists(
        st.tuples(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64]), st.integers(0, 3)), max_size=6
    ),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_what_does_not_move_is_copied_exactly(kinds: list, fence_first: bool, seed: int) -> None:
    """Tensors of every width and number of dimensions, strided ones too, arrive bit for bit, whoever copied them."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for dtype, dims in kinds:
        shape = [int(n) for n in torch.randint(1, 7, (dims,), generator=generator)]
        tensor = torch.randint(0, 100, shape, generator=generator).to(dtype)
        tensors.append(tensor.transpose(0, -1) if dims > 1 else tensor)
    moves, ended = moves_of(*tensors), Ended()
    copy = BackgroundCopy(lay_tracks(moves), ended)
    if fence_first:
        copy.fence()
        assert all(torch.equal(move.source, move.target) for move in moves)
    copy.start()
    copy.join()
    assert ended.error is None
    for move in moves:
        assert np.array_equal(move.source.numpy(), move.target.numpy())


def by_foreach(tensor: torch.Tensor) -> None:
    torch._foreach_add_([tensor], 1.0)


def by_data(tensor: torch.Tensor) -> None:
    tensor.data.add_(1.0)


def by_numpy(tensor: torch.Tensor) -> None:
    tensor.detach().numpy()[...] += 1


def by_fused_step(tensor: torch.Tensor) -> None:
    tensor.grad = torch.ones_like(tensor)
    torch.optim.AdamW([tensor], lr=0.1, fused=True).step()


def by_foreach_step(tensor: torch.Tensor) -> None:
    tensor.grad = torch.ones_like(tensor)
    torch.optim.AdamW([tensor], lr=0.1, foreach=True).step()


@pytest.mark.parametrize("change", [by_foreach, by_data, by_numpy, by_fused_step, by_foreach_step])
@pytest.mark.parametrize("shape", [(), (5,), (64, 33), (3, 4, 5)])
def test_what_moves_before_it_is_copied_is_named(change: object, shape: tuple[int, ...]) -> None:
    """foreach, fused, `.data` and numpy writes between the call and the copy fail it, and name the tensor alone."""
    still, moving = torch.randn(7), nn.Parameter(torch.randn(shape))
    ended = Ended()
    copy = BackgroundCopy(lay_tracks(moves_of(still, moving)), ended)
    with torch.no_grad() if change is not by_fused_step else torch.enable_grad():
        change(moving)  # type: ignore[operator]
    copy.start()
    copy.join()
    assert isinstance(ended.error, TornSnapshot)
    assert ended.error.members["tensors"] == ["t1"]


@pytest.fixture(params=["library", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the library that copies, and without."""
    if request.param == "numpy":
        monkeypatch.setattr(native_copy, "_library", None)


def torn_by(tensor: torch.Tensor, change: Callable[[], object], full: bool) -> bool:
    """Whether a save is refused under whose copy the tensor changes."""
    ended = Ended()
    copy = BackgroundCopy(lay_tracks(moves_of(tensor)), ended, full=full)
    change()
    copy.start()
    copy.join()
    assert ended.error is None or isinstance(ended.error, TornSnapshot)
    return ended.error is not None


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("megabytes", [1, 24, 96])
def test_64_kib_in_a_row_never_change_unseen(megabytes: int, turned: bool) -> None:
    """Wherever they stand, and however large the state around them: rows of a table that are written past torch. Also where
    the table is stored transposed.
    """
    table = torch.zeros(megabytes * 2**20 // 256, 64)
    for first in np.random.default_rng(megabytes).integers(0, len(table) - 256, 20 if megabytes < 96 else 4).tolist():
        stored = table.t() if turned else table
        assert torn_by(stored, lambda first=first: table.data[first : first + 256].numpy().__iadd__(1), full=False)


@pytest.mark.usefixtures("way")
def test_scattered_rows_are_seen_as_often_as_stated() -> None:
    """A hundred rows of 256 bytes in 24 MiB, of which each has a place in sixteen: 1 - (1 - 256/512)^100 and more."""
    table = torch.zeros(24 * 2**12, 64)
    random = np.random.default_rng(5)
    for _ in range(10):
        rows = random.integers(0, len(table), 100)
        assert torn_by(table, lambda rows=rows: table.numpy().__setitem__(rows, random.integers(1, 9)), full=False)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("turned", [False, True])
def test_a_full_check_sees_one_bit(turned: bool) -> None:
    """Anywhere, also in memory that is not contiguous, and names the tensor; without a change nothing is wrong."""
    tensor = torch.zeros(3000, 700, dtype=torch.bfloat16)
    live = tensor.T if turned else tensor
    octets = tensor.view(torch.uint8).numpy()
    for at in ((0, 0), (1733, 901), (2999, 1399)):
        assert torn_by(live, lambda at=at: octets.__setitem__(at, octets[at] ^ 1), full=True)
    assert not torn_by(live, lambda: None, full=True)


def test_full_checks_are_asked_for_by_name(daemon: RunningDaemon) -> None:
    """At each save; another word is refused."""
    state = {"x": torch.zeros(2**22)}
    with Checkpointer("full", state, at=daemon.socket, fenced=True) as checkpointer:
        for step in range(1, 31):
            ticket = checkpointer.save(step, check="full")
            state["x"].numpy()[-1] += 1
            try:
                ticket.result(180)
            except TornSnapshot:
                break
            checkpointer.fence()
        else:
            pytest.fail("the write never met the copy, which makes this test void")
        checkpointer._tickets.take_failure()
        with pytest.raises(InvalidRequest, match="sampled, full"):
            checkpointer.save(99, check="some")


def test_a_copy_that_fails_ends_the_save_and_not_the_training() -> None:
    """An unforeseen failure of a copy is an error at the end, never an exception in the fence."""
    source, ended = torch.ones(4), Ended()
    copy = BackgroundCopy(lay_tracks([Move("t", source, torch.empty(5))]), ended)
    copy.fence()
    copy.start()
    copy.join()
    assert ended.error is not None and "background copy failed" in ended.error.detail


def big_state(optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: object) -> dict:
    """A model of 32 MiB and its optimizer, which has stepped once."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    optim = optimizer(model.parameters(), lr=0.1, **options)
    step(model, optim)
    return {"model": model, "optim": optim}


def step(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optim.step()


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_a_step_right_behind_a_save_waits_for_the_copy(daemon: RunningDaemon, options: dict) -> None:
    """The registered optimizer steps at once after save(): the checkpoint holds the state before the step."""
    state = big_state(**options)
    run = f"fence-{'-'.join(options)}-{options}".translate(str.maketrans("", "", "{}': "))
    with Checkpointer(run, state, at=daemon.socket) as checkpointer:
        for number in range(1, 4):
            before = {name: tensor.clone() for name, tensor in state["model"].state_dict().items()}
            ticket = checkpointer.save(number)
            step(state["model"], state["optim"])
            ticket.result(180)
        assert checkpointer.restore() == 3
    assert all(torch.equal(tensor, before[name]) for name, tensor in state["model"].state_dict().items())


def test_an_optimizer_that_was_not_registered_fails_the_save(daemon: RunningDaemon) -> None:
    """A step nobody could hold back either came after the copy, or fails the save by name; training goes on."""
    state = big_state()
    stranger = torch.optim.SGD(state["model"].parameters(), lr=1.0)
    torn = 0
    with Checkpointer("stranger", state, at=daemon.socket) as checkpointer:
        for number in range(1, 31):
            before = {name: tensor.clone() for name, tensor in state["model"].state_dict().items()}
            ticket = checkpointer.save(number)
            stranger.step()  # the gradients are there already
            try:
                ticket.result(180)
            except TornSnapshot as error:
                torn += 1
                assert "model/" in error.detail and "fence()" in error.hint
                break
            checkpointer.restore(number)
            assert all(torch.equal(t, before[name]) for name, t in state["model"].state_dict().items())
        assert torn, "the stranger never met the copy, which makes this test void"
        with pytest.warns(SaveWarning, match="torn-snapshot"):
            checkpointer.save(99, wait="durable")


def test_an_ema_updated_at_the_wrong_place_fails_the_save(daemon: RunningDaemon) -> None:
    """An EMA that is changed under the copy is noticed, however long that takes to happen; with a fence it is fine."""
    state = big_state()
    state["ema"] = {name: torch.zeros_like(p) for name, p in state["model"].named_parameters()}
    with Checkpointer("ema", state, at=daemon.socket) as checkpointer:
        torn: TornSnapshot | None = None
        for number in range(1, 31):
            ticket = checkpointer.save(number)
            for tensor in reversed(state["ema"].values()):
                tensor.add_(1)
            try:
                ticket.result(180)
            except TornSnapshot as error:
                torn = error
                break
        assert torn is not None and "ema/" in torn.detail
        with pytest.warns(SaveWarning):
            ticket = checkpointer.save(99)
        checkpointer.fence()
        for tensor in state["ema"].values():
            tensor.add_(1)
        ticket.result(180)


def test_buffers_are_copied_before_save_returns(daemon: RunningDaemon) -> None:
    """What a forward changes, such as batch statistics, is taken at the call."""
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8))
    state = {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}
    mean = model[0].running_mean.clone()
    with Checkpointer("buffers", state, at=daemon.socket) as checkpointer:
        ticket = checkpointer.save(1)
        model(torch.randn(16, 8) + 5)
        assert not torch.equal(model[0].running_mean, mean)
        ticket.result(180)
        checkpointer.restore()
    assert torch.equal(model[0].running_mean, mean)


def test_small_tensors_with_strides_are_saved(daemon: RunningDaemon) -> None:
    """Every other element, one element of odd stride, a transposed matrix: small, and not plain bytes."""
    state = {"other": torch.arange(10.0)[::2], "one": torch.arange(3.0)[::3], "turned": torch.arange(6).view(2, 3).T}
    expected = {name: tensor.clone() for name, tensor in state.items()}
    with Checkpointer("strides", state, at=daemon.socket) as checkpointer:
        checkpointer.save(1, wait="durable")
        for tensor in state.values():
            tensor.zero_()
        assert checkpointer.restore() == 1
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
