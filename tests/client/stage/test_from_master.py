"""Saves with `model="from-master"`: the same checkpoints, from slots without weights; refused where they would not be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from holdfast import Api, Checkpointer, Fragment, ParallelLayout
from holdfast.rest import service_jobs
from holdfast.stage import from_master
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError, InvalidRequest, StateMismatch
from holdfast_formats.rest.jobs import VerifyJob
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.storage import PosixTier
from tests.client import llama
from tests.client.test_fragment_worlds import SHAPE, WHOLE, check, megatron
from tests.client.test_trainer_options import Mixed
from tests.crash.points import STOPS
from tests.daemons import RunningDaemon, wait_until
from tests.kit.ranks import World

FROM_MASTER: Any = {"model": "from-master"}


class Training:
    """Mixed precision by hand: a BF16 model with tied weights, F32 masters in the state, and AdamW over the masters."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 50, bias=False))
        self.model.to(dtype)
        self.model[3].weight = self.model[0].weight
        self.model[2].float()  # without a master
        self.master = {
            name: value.detach().float().requires_grad_()
            for name, value in self.model.named_parameters()
            if value.dtype is dtype
        }
        whole = [value for value in self.model.parameters() if value.dtype is not dtype]
        self.optim = torch.optim.AdamW([*self.master.values(), *whole], lr=0.01)
        self.state = {"model": self.model, "master": self.master, "optim": self.optim, "step": 0}

    def step(self) -> None:
        parameters = dict(self.model.named_parameters())
        inputs = torch.arange(24) % 50
        hidden = self.model[1](self.model[0](inputs))
        self.model[3](self.model[2](hidden.float()).to(hidden.dtype)).float().logsumexp(1).sum().backward()
        for name, value in self.master.items():
            value.grad = parameters[name].grad.float() if parameters[name].grad is not None else None
        self.optim.step()
        self.model.zero_grad()
        self.renew()

    @torch.no_grad()
    def renew(self) -> None:
        parameters = dict(self.model.named_parameters())
        for name, value in self.master.items():
            parameters[name].copy_(value)

    def tensors(self) -> list[torch.Tensor]:
        return [value.detach().clone() for value in (*self.model.parameters(), *self.master.values())]


def directory(daemon: RunningDaemon, run: str, step: int) -> Path:
    return daemon.root / naming.checkpoint_path(run, step)


def contents(path: Path) -> dict[str, Any]:
    """Every file's bytes, and what the manifest says but for whose and when it is."""
    files: dict[str, Any] = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    made = json.loads(files.pop("manifest.json"))
    files.pop("COMMIT")
    other = {"run", "attempt", "created", "turn", "lineage", "durations", "measured", "nodes", "save"}
    return {**files, "manifest": {key: value for key, value in made.items() if key not in other}}


def same(daemon: RunningDaemon, rounded: str, copied: str, step: int) -> bool:
    ours, theirs = contents(directory(daemon, rounded, step)), contents(directory(daemon, copied, step))
    assert [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)] == []
    return True


def slot_bytes(checkpointer: Checkpointer) -> int:
    """What the last save took of its slot."""
    return checkpointer._contents.layout.data_bytes


def test_a_checkpoint_is_the_same_and_its_slot_smaller(daemon: RunningDaemon, run: str) -> None:
    """AdamW, tied weights and weights without a master, over several saves: file by file, and restored from both memory and
    files.
    """
    training = Training()
    with (
        Checkpointer(run, training.state, at=daemon.socket, **FROM_MASTER) as rounded,
        Checkpointer(f"{run}-copied", training.state, at=daemon.socket) as copied,
    ):
        for step in (1, 2, 3):
            training.step()
            training.state["step"] = step
            ticket = rounded.save(step, wait="durable")
            copied.save(step, wait="durable")
            assert ticket.notes == ()
            assert same(daemon, run, f"{run}-copied", step)
        saved = 2 * sum(value.numel() for value in training.master.values())
        assert slot_bytes(copied) - saved - 4096 <= slot_bytes(rounded) <= slot_bytes(copied) - saved + 4096
        stored = load_file(directory(daemon, run, 3) / "model.safetensors")
        assert torch.equal(stored["1.weight"], training.model[1].weight)
        before = training.tensors()
        training.step()
        assert rounded.restore() == 3
        assert rounded.last_restore is not None and rounded.last_restore.source == "slot", rounded.last_restore
        assert all(map(torch.equal, before, training.tensors()))
        training.step()
        assert rounded.restore(2) == 2  # from its files
        assert rounded.last_restore.source == "directory"


def test_fp16(daemon: RunningDaemon, run: str) -> None:
    """Infinite and subnormal weights too."""
    training = Training(dtype=torch.float16)
    with torch.no_grad():
        training.master["1.weight"][0, :4] = torch.tensor([1e6, 65519.0, 65520.0, 1e-7])
        training.renew()
    with (
        Checkpointer(run, training.state, at=daemon.socket, **FROM_MASTER) as rounded,
        Checkpointer(f"{run}-copied", training.state, at=daemon.socket) as copied,
    ):
        for one in (rounded, copied):
            one.save(1, wait="durable")
    assert same(daemon, run, f"{run}-copied", 1)


def test_masters_in_an_optimizer(daemon: RunningDaemon, run: str) -> None:
    """Before its first step it has none: weights are copied, which the ticket says; from then on they are not."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64).bfloat16()
    optim = Mixed(model.parameters())
    state = {"model": model, "optim": optim}
    with Checkpointer(run, state, at=daemon.socket, **FROM_MASTER) as rounded:
        ticket = rounded.save(1, wait="durable")
        assert any(
            "2 of the model's tensors were copied" in note and "no tensor in group master" in note for note in ticket.notes
        )
        optim.step()
        ticket = rounded.save(2, wait="durable")
        assert ticket.notes == ()
        assert [leaf.name for leaf in rounded._contents.layout.leaves if leaf.rounded_from] == ["weight", "bias"]
    with Checkpointer(f"{run}-copied", state, at=daemon.socket) as copied:
        copied.save(2, wait="durable")
    assert same(daemon, run, f"{run}-copied", 2)


def test_a_save_without_masters_copies_weights(daemon: RunningDaemon, run: str) -> None:
    """groups= and every= leave masters out: what is committed is the same, and the next save leaves weights out again."""
    training = Training()
    with (
        Checkpointer(run, training.state, at=daemon.socket, **FROM_MASTER) as rounded,
        Checkpointer(f"{run}-copied", training.state, at=daemon.socket) as copied,
    ):
        for step, options in enumerate([{}, {"groups": ("model",)}, {}, {"every": {"master": 2}}, {"every": {"master": 2}}]):
            training.step()
            ticket = rounded.save(step, wait="durable", **options)
            copied.save(step, wait="durable", **options)
            assert same(daemon, run, f"{run}-copied", step)
            left_out = [leaf for leaf in rounded._contents.layout.leaves if leaf.rounded_from]
            assert bool(left_out) == ("master" in ticket.groups)
            assert any("this save has no tensor in group master" in note for note in ticket.notes) != bool(left_out)


@pytest.mark.parametrize("shape", ["flat", "half"])
def test_masters_of_another_form_are_no_masters(daemon: RunningDaemon, run: str, shape: str) -> None:
    """A flat master, or one of FP64: the weight is copied and the ticket names it; the others are not."""
    training = Training()
    master = training.master["1.weight"].detach()
    other = {**training.master, "1.weight": master.reshape(-1) if shape == "flat" else master.double()}
    with Checkpointer(run, {"model": training.model, "master": other}, at=daemon.socket, **FROM_MASTER) as rounded:
        ticket = rounded.save(1, wait="durable")
        assert "1 of the model's tensors were copied (1.weight)" in ticket.notes[0]
        assert [leaf.name for leaf in rounded._contents.layout.leaves if leaf.rounded_from] == ["0.weight", "1.bias"]
    stored = load_file(directory(daemon, run, 1) / "model.safetensors")
    assert torch.equal(stored["1.weight"], training.model[1].weight)


def drift(training: Training) -> None:
    training.model[1].weight[0, :3] *= 1.5


def negative_zero(training: Training) -> None:
    training.master["1.weight"][0, :3] = -0.0
    training.model[1].weight[0, :3] = 0.0


def truncated(training: Training) -> None:
    training.master["1.weight"][0, :3] = 1.99999
    training.model[1].weight[0, :3] = 1.9921875


@pytest.mark.parametrize("spoil", [drift, negative_zero, truncated])
def test_weights_that_are_not_rounded_masters_are_refused(
    daemon: RunningDaemon, run: str, spoil: Callable[[Training], None]
) -> None:
    """By name and number of elements, before anything is committed, and again until they are; other saves go on."""
    training = Training()
    training.step()
    with torch.no_grad():
        spoil(training)
    with Checkpointer(run, training.state, at=daemon.socket, **FROM_MASTER) as rounded:
        for _ in range(2):
            with pytest.raises(
                StateMismatch, match=r"1 of the model's tensors .* model/1.weight \(3 of 4096 elements differ\)"
            ) as caught:
                rounded.save(1)
            assert caught.value.members["tensors"] == ["model/1.weight"] and "leave out model=" in caught.value.hint
        rounded.save(2, groups=("model",), wait="durable")
        training.renew()
        rounded.save(3, wait="durable")
    stored = load_file(directory(daemon, run, 3) / "model.safetensors")
    assert torch.equal(stored["1.weight"], training.model[1].weight)


@pytest.mark.filterwarnings("ignore::holdfast.SaveWarning")
def test_nan_is_refused_whenever_it_comes(daemon: RunningDaemon, run: str) -> None:
    """At the first save by the rank, later by the daemon, by name; what was committed stands, and saves go on after it."""
    training = Training()
    with torch.no_grad():
        training.master["1.bias"][7] = float("nan")
        training.renew()
    with Checkpointer(run, training.state, at=daemon.socket, **FROM_MASTER) as rounded:
        with pytest.raises(StateMismatch, match=r"model/1.bias \(NaN in 1 of 64 elements of its master\)"):
            rounded.save(1)
        with torch.no_grad():
            training.master["1.bias"][7] = 0
            training.renew()
        rounded.save(2, wait="durable")
        with torch.no_grad():
            training.master["1.bias"][7] = float("nan")
            training.renew()
        with pytest.raises(StateMismatch, match=r"the master of '1.bias' has NaN"):
            rounded.save(3, wait="durable")
        with torch.no_grad():
            training.master["1.bias"][7] = 1
            training.renew()
        rounded.save(4, wait="durable")
    assert {path.name for path in directory(daemon, run, 2).parent.iterdir()} == {
        naming.step_directory(2),
        naming.step_directory(4),
    }


def test_weights_are_compared_again_after_a_restore(daemon: RunningDaemon, run: str) -> None:
    """A checkpoint of a trainer without the option may have any weights."""
    training = Training()
    with torch.no_grad():
        drift(training)
    with Checkpointer(run, training.state, at=daemon.socket) as copied:
        copied.save(1, wait="durable")
    training.renew()
    with Checkpointer(run, training.state, at=daemon.socket, **FROM_MASTER) as rounded:
        rounded.goes_on_from(1)
        rounded.save(2, wait="durable")
        rounded.restore(1)
        with pytest.raises(StateMismatch, match=r"3 of 4096 elements differ"):
            rounded.save(3)
        training.renew()
        rounded.save(4, wait="durable")


@pytest.mark.parametrize("option", ["from-masters", "as-is", 3])
def test_other_options_are_refused(daemon: RunningDaemon, option: Any) -> None:
    with pytest.raises(InvalidRequest, match="model must be 'from-master' or None"):
        Checkpointer("r", {}, at=daemon.socket, model=option)


def test_a_remote_rank_uploads_masters_alone(daemon: RunningDaemon, run: str) -> None:
    """Over HTTP."""
    training = Training()
    with Checkpointer(run, training.state, at=daemon.about["url"], **FROM_MASTER) as rounded:
        rounded.save(1, wait="durable")
    with Checkpointer(f"{run}-copied", training.state, at=daemon.socket) as copied:
        copied.save(1, wait="durable")
    assert same(daemon, run, f"{run}-copied", 1)


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (2, 2), (1, 3), (3, 2)])
def test_ranks_with_parts_of_masters(daemon: RunningDaemon, run: str, tp: int, dp: int) -> None:
    """Tensor parallelism and a distributed optimizer: all weights on each rank, masters over all; saved, and restored from
    memory.
    """
    states = megatron(WHOLE, tp, dp)
    world, plain = World(daemon, run, states, **FROM_MASTER), World(daemon, f"{run}-copied", states)
    for step in (1, 2):
        assert world.save(step) == plain.save(step) == [None] * (tp * dp)
        assert same(daemon, run, f"{run}-copied", step)
        for state in states:
            for part in (*state["model"]["w"], *state["master"]["w"]):
                part.tensor.mul_(2)
    assert world.restore() == [2] * len(states)
    check(states, 2 * WHOLE)
    assert all(rank.last_restore.source == "slot" for rank in world.ranks)
    world.close(), plain.close()
    others = megatron(torch.zeros(SHAPE), 2, 1)
    world = World(daemon, run, others, launch="b", **FROM_MASTER)
    assert world.restore() == [2, 2]
    check(others, 2 * WHOLE)
    world.close()


def test_a_rank_whose_weights_differ_ends_the_save_for_all(daemon: RunningDaemon, run: str) -> None:
    """The others do not wait for it."""
    states = megatron(WHOLE, 1, 2)
    world = World(daemon, run, states, **FROM_MASTER)
    states[1]["model"]["w"][1].tensor[-1, -1] += 1
    ticket = world.ranks[0].save(1)
    with pytest.raises(StateMismatch, match=r"model/w \(1 of 120 elements differ\)"):
        world.ranks[1].save(1)
    with pytest.raises(CheckpointError, match=r"1 of 120 elements differ"):
        ticket.result(180)
    world.ranks[0]._tickets.take_failure()
    states[1]["model"]["w"][1].tensor[-1, -1] -= 1
    states[1]["model"]["w"][1].tensor.copy_(WHOLE[12:].bfloat16())
    assert world.save(2) == [None, None]
    world.close()


def test_ranks_that_do_not_all_know_of_a_master(daemon: RunningDaemon, run: str) -> None:
    """Two ranks, one of which has the weight and no word of its master: refused on both, by name; so are missing parts."""
    weight, master = WHOLE.bfloat16(), WHOLE.clone()
    states: list[dict[str, Any]] = [
        {"model": {"w": weight.clone()}, "master": {"w": master, "other": torch.ones(1)}},
        {"model": {"w": weight.clone()}, "master": {"other": torch.ones(1)}},
    ]
    world = World(daemon, run, states, **FROM_MASTER)
    for error in world.save(1):
        assert isinstance(error, StateMismatch) and "model/w is to be rounded from master/w" in error.detail
        assert "empty Fragment" in error.hint
    states[1]["master"]["w"] = Fragment(torch.empty(0), SHAPE, flat=(0, 0))
    assert world.save(2) == [None, None]
    states[0]["master"]["w"] = Fragment(master.view(-1)[:100], SHAPE, flat=(0, 100))
    for error in world.save(3):
        assert isinstance(error, StateMismatch) and "'w' of group 'master': the ranks hold 400 of its 960" in error.detail
    world.close()


def test_masters_of_weights_that_another_rank_holds(daemon: RunningDaemon, run: str) -> None:
    """Nobody could compare them."""
    half = SHAPE[0] // 2
    states = [
        {
            "model": {"w": Fragment(WHOLE[at : at + half].bfloat16(), SHAPE, offset=(at, 0))},
            "master": {"w": Fragment(WHOLE[half - at : SHAPE[0] - at].clone(), SHAPE, offset=(half - at, 0))},
        }
        for at in (0, half)
    ]
    world = World(daemon, run, states, **FROM_MASTER)
    with pytest.raises(StateMismatch, match="this rank has 120 elements of the master but not of the weight"):
        world.ranks[0].save(1)
    world.close()


@pytest.mark.parametrize("layout", ["tp=2", "pp=2", "dp=2"])
def test_a_declared_layout(daemon: RunningDaemon, run: str, layout: str) -> None:
    """Plain tensors of ranks, of weights and masters alike: paired under the names that are stored."""
    states = []
    for rank in range(2):
        held = llama.arrays()
        if layout == "tp=2":
            held = llama.cut(held, 2, rank)
        elif layout == "pp=2":
            held = {name: held[name] for name in llama.shapes(range(rank, rank + 1), first=rank == 0, last=rank == 1)}
        master = {name: torch.from_numpy(array.copy()) for name, array in held.items()}
        states.append({"model": {name: tensor.bfloat16() for name, tensor in master.items()}, "master": master})
    declared: Any = {"layout": ParallelLayout(layout, config=llama.CONFIG)}
    world, plain = World(daemon, run, states, **declared, **FROM_MASTER), World(daemon, f"{run}-copied", states, **declared)
    assert world.save(1) == plain.save(1) == [None, None]
    assert all(leaf.rounded_from for leaf in world.ranks[0]._contents.layout.leaves if leaf.group == "model")
    assert same(daemon, run, f"{run}-copied", 1)
    world.close(), plain.close()


def test_a_model_without_short_floats(daemon: RunningDaemon, run: str) -> None:
    """The option has nothing to do, and says so."""
    state = {"model": nn.Linear(4, 4), "master": {"weight": torch.zeros(4, 4)}}
    with Checkpointer(run, state, at=daemon.socket, **FROM_MASTER) as rounded:
        ticket = rounded.save(1, wait="durable")
    assert "the model has no BF16 or FP16 tensors" in ticket.notes[0]


def test_weights_are_repaired_from_masters_in_memory(daemon: RunningDaemon, run: str) -> None:
    """A flipped bit in the files, while the slots of the save are held: by the job, or by the daemon that saw the change."""
    training = Training()
    with Checkpointer(run, training.state, at=daemon.socket, **FROM_MASTER) as rounded, Api(daemon.about["url"]) as api:
        rounded.save(1, wait="durable")
        wait_until(lambda: api.checkpoint(run, 1).verified)
        path = directory(daemon, run, 1) / "model.safetensors"
        sound = path.read_bytes()
        path.write_bytes(sound[:-700] + bytes([sound[-700] ^ 1]) + sound[-699:])
        service_jobs.as_job(api, VerifyJob(run=run, step=1, arguments={"repair": True}), lambda *_: None)
        asked = {"run": run, "kind": "checkpoint-repaired"}
        (told,) = api.request("GET", "/v1/events", params=asked).json()["items"]
        assert (told["detail"]["file"], told["detail"]["source"]) == ("model.safetensors", "slot")
        assert path.read_bytes() == sound


@pytest.mark.parametrize("point", ["not all sealed", "mid write", "before manifest"])
def test_sealed_slots_outlive_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str, point: str) -> None:
    """The daemon is killed between the seals and the commit; the next one rounds what stands in slots, and nowhere else."""
    root, marks = tmp_path / "root", tmp_path / "marks"
    marks.mkdir()
    with monkeypatch.context() as patched:
        if point != "not all sealed":
            for name, value in (("PYTHONPATH", STOPS), ("CRASH_POINT", point), ("CRASH_DIRECTORY", marks)):
                patched.setenv(name, str(value))
        daemon = RunningDaemon(root)
    states = megatron(WHOLE, 1, 2)
    world = World(daemon, run, states, **FROM_MASTER)
    assert world.save(1) == [None, None]
    (marks / "armed").write_text("")
    tickets = [world.ranks[0].save(2, wait="staged")]
    if point != "not all sealed":
        tickets.append(world.ranks[1].save(2, wait="staged"))
        wait_until(lambda: (marks / "hit").exists())
    daemon.kill()
    for part in (*states[0]["model"]["w"], *states[0]["master"]["w"]):
        part.tensor.zero_()
    daemon = RunningDaemon(root)
    try:
        if point == "not all sealed":
            tickets.append(world.ranks[1].save(2))
        for ticket in tickets:
            ticket.result(180)
        world.close()
        assert torch.equal(load_file(directory(daemon, run, 2) / "model.safetensors")["w"], WHOLE.bfloat16())
        verify(PosixTier(root), naming.checkpoint_path(run, 2))
    finally:
        daemon.stop()


@given(
    st.sampled_from([torch.bfloat16, torch.float16]),
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40),
    st.booleans(),
)
def test_devices_compare_as_the_cpu_does(dtype: torch.dtype, bits: list[int], turned: bool) -> None:
    """Any bits, also NaN; any strides."""
    master = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
    weight = master.to(dtype)
    weight[0] = 1.5
    if turned:
        master, weight = torch.stack([master, master], 1)[:, 0], torch.stack([weight, weight], 1)[:, 0]
    there, nan = from_master._compare_there(weight, master)
    here, strange = from_master._compare(weight, master)
    assert nan == strange == int(master.isnan().sum())
    if not nan:  # which bits of it a rounding keeps is its own affair
        assert there == here == int(master[0].to(dtype).view(torch.int16) != weight[0].view(torch.int16))
