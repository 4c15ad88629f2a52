"""Options of `save()` and `restore()` with a daemon: casts, masters, names left out, groups with a rhythm, streams."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import Api, Checkpointer
from holdfast_formats import naming
from holdfast_formats.errors import AlreadyCommitted, CorruptExtent, InvalidRequest, StateMismatch, StateOverwritten
from tests.daemons import RunningDaemon, wait_until


class Mixed(torch.optim.Optimizer):
    """Weights of BF16, and their masters in its state from the first step on."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 2.0**-9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            kept = self.state[parameter]
            if not kept:
                kept.update(
                    master_param=parameter.detach().float(), exp_avg=torch.zeros_like(parameter, dtype=torch.float32)
                )
            kept["exp_avg"] += 1.0001
            kept["master_param"] -= self.param_groups[0]["lr"] * kept["exp_avg"]
            parameter.copy_(kept["master_param"])


def mixed(seed: int, steps: int = 1) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)).bfloat16()
    optim = Mixed(model.parameters())
    for _ in range(steps):
        optim.step()
    return {"model": model, "optim": optim, "shuffle": torch.Generator().manual_seed(seed)}


def copied(state: dict[str, Any]) -> list[torch.Tensor]:
    parameters = [*state["model"].parameters()]
    kept = [tensor for p in parameters for tensor in state["optim"].state[p].values()]
    return [tensor.detach().clone() for tensor in (*parameters, *kept)]


def test_weights_with_masters_from_them_and_the_rest_as_it_was(daemon: RunningDaemon, run: str) -> None:
    """Refused without the option; with it the next step goes on from the restored weights."""
    saved, live = mixed(1), mixed(2)
    with Checkpointer(run, saved, at=daemon.socket) as checkpointer:
        checkpointer.save(1, wait="durable")
    with Checkpointer(run, live, at=daemon.socket) as checkpointer:
        before = copied(live)
        with pytest.raises(StateMismatch, match="4 full-precision masters"):
            checkpointer.restore(groups=("model",))
        assert all(map(torch.equal, before, copied(live)))
        assert checkpointer.restore(groups=("model",), masters="from-model") == 1
        assert checkpointer.last_restore is not None
        assert any("masters were copied from the restored weights" in note for note in checkpointer.last_restore.notes)
        for theirs, mine in zip(saved["model"].parameters(), live["model"].parameters(), strict=True):
            assert torch.equal(mine, theirs) and torch.equal(live["optim"].state[mine]["master_param"], theirs.float())
        live["optim"].step()


def test_a_restore_that_fails_leaves_nobody_training_on_half_of_it(daemon: RunningDaemon, run: str) -> None:
    """A flipped bit in the last weights: steps and saves are refused until masters and weights are whole together."""
    saved = mixed(1)
    with Checkpointer(run, saved, at=daemon.socket) as checkpointer:
        checkpointer.save(1, wait="durable")
        checkpointer.save(2, wait="durable")
    file = daemon.root / naming.checkpoint_path(run, 2) / "model.safetensors"
    with Api(daemon.url) as api:
        wait_until(lambda: api.checkpoint(run, 2).verified)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)
    live = mixed(2)
    with Checkpointer(run, live, at=daemon.socket) as checkpointer:
        with pytest.raises(CorruptExtent):
            checkpointer.restore(2, groups=("model",), masters="from-model")
        for parameter in live["model"].parameters():  # no master is of the half-restored weights
            assert live["optim"].state[parameter]["exp_avg"].eq(1.0001).all()
        with pytest.raises(StateOverwritten):
            live["optim"].step()
        with pytest.raises(StateOverwritten):
            checkpointer.save(7)
        assert checkpointer.restore(1, groups=("model",), masters="from-model") == 1
        for theirs, mine in zip(saved["model"].parameters(), live["model"].parameters(), strict=True):
            assert torch.equal(live["optim"].state[mine]["master_param"], theirs.float())
        live["optim"].step()


def test_an_object_that_raises_in_the_middle_tears_what_was_set(daemon: RunningDaemon, run: str) -> None:
    """The scheduler's own error comes after the weights were written: nobody steps, although all digests were right."""

    class Stubborn:
        fails = False

        def state_dict(self) -> dict[str, int]:
            return {"n": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            if self.fails:
                raise RuntimeError("not now")

    saved, live = {**mixed(1), "plan": Stubborn()}, {**mixed(2), "plan": Stubborn()}
    with Checkpointer(run, saved, at=daemon.socket) as checkpointer:
        checkpointer.save(1, wait="durable")
    with Checkpointer(run, live, at=daemon.socket) as checkpointer:
        live["plan"].fails = True
        with pytest.raises(RuntimeError, match="not now"):
            checkpointer.restore(groups=("model", "extra"), masters="from-model")
        with pytest.raises(StateOverwritten):
            live["optim"].step()
        live["plan"].fails = False
        checkpointer.restore()
        assert all(map(torch.equal, copied(saved), copied(live)))
        live["optim"].step()


def test_full_precision_into_mixed_and_back(daemon: RunningDaemon, run: str) -> None:
    """F32 weights into BF16 ones with masters, and BF16 ones into F32: rounded as torch does, and said."""
    torch.manual_seed(5)
    full = {"model": nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))}
    live = mixed(2)
    with Checkpointer(run, full, at=daemon.socket) as checkpointer:
        checkpointer.save(1, wait="durable")
    with Checkpointer(run, live, at=daemon.socket) as checkpointer:
        with pytest.raises(StateMismatch, match="stored F32") as told:
            checkpointer.restore(groups=("model",), masters="from-model")
        assert "cast=True" in told.value.hint
        checkpointer.restore(groups=("model",), masters="from-model", cast=True)
        assert any("4 tensors were cast from F32 to BF16" in note for note in checkpointer.last_restore.notes)  # type: ignore[union-attr]
        for theirs, mine in zip(full["model"].parameters(), live["model"].parameters(), strict=True):
            assert torch.equal(mine, theirs.bfloat16())
            assert torch.equal(live["optim"].state[mine]["master_param"], theirs.bfloat16().float())
        checkpointer.save(2, groups=("model",), wait="durable")
    with Checkpointer(run, full, at=daemon.socket) as checkpointer:
        checkpointer.restore(2, groups=("model",), cast=True)
        for theirs, mine in zip(live["model"].parameters(), full["model"].parameters(), strict=True):
            assert torch.equal(mine, theirs.float())


def test_a_value_that_does_not_fit_is_found_before_anything_changes(daemon: RunningDaemon, run: str) -> None:
    """With `prove_first`: one weight of the last layer is too large for FP16, and the first layer is as it was."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].weight[3, 3] = 1e5
    live = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half()
    before = [parameter.clone() for parameter in live.parameters()]
    with Checkpointer(run, {"model": model}, at=daemon.socket) as checkpointer:
        checkpointer.save(1, wait="durable")
    with Checkpointer(run, {"model": live}, at=daemon.socket) as checkpointer:
        with pytest.raises(StateMismatch, match=r"model/1\.weight: stored values up to 1e\+05 do not fit into F16"):
            checkpointer.restore(cast=True, prove_first=True)
        assert all(map(torch.equal, before, live.parameters()))
        checkpointer.goes_on_from(1)
        checkpointer.save(2, wait="durable")  # the old state is whole
        with torch.no_grad():
            live[0].weight.zero_()
        checkpointer.restore(2, cast=True, prove_first=True)
        assert all(map(torch.equal, before, live.parameters()))


def test_names_left_out_are_not_in_the_files(daemon: RunningDaemon, run: str) -> None:
    """The directory has the rest, the ticket says what is missing, and the same patterns restore it."""
    model = nn.Linear(4, 4)
    model.register_buffer("rotary", torch.ones(3))
    state = {"model": model, "cache": {"big": torch.ones(5), "n": 1}, "epoch": 4}
    with Checkpointer(run, state, at=daemon.socket) as checkpointer:
        with pytest.raises(InvalidRequest, match=r"model/weight, and it is trained"):
            checkpointer.save(1, exclude=("model/w*",))
        ticket = checkpointer.save(1, exclude=("model/*rotary*", "extra/cache"))
        ticket.result(180)
        assert ticket.notes == (
            "left out by exclude=, so not in the checkpoint: extra/cache, extra/cache/big, model/rotary",
        )
        index = json.loads((daemon.root / naming.checkpoint_path(run, 1) / "model.safetensors.index.json").read_bytes())
        assert set(index["weight_map"]) == {"weight", "bias"}
        state["epoch"] = 0
        model.rotary.zero_()
        with pytest.raises(StateMismatch, match="model/rotary"):
            checkpointer.restore()
        checkpointer.restore(exclude=("model/*rotary*", "extra/cache"))
        assert state["epoch"] == 4 and not model.rotary.any()


def test_a_save_with_names_left_out_is_not_the_same_as_one_with_all(daemon: RunningDaemon, run: str) -> None:
    """Under way or committed: `existing="same"` takes no checkpoint for saved that lacks what is to be saved."""
    state = {"model": nn.Linear(4, 4), "replay": {"n": 1, "x": torch.ones(5)}}
    out = ("extra/replay",)
    with Checkpointer(run, state, at=daemon.socket) as checkpointer:
        under_way = checkpointer.save(1, exclude=out)
        assert checkpointer.save(1, exclude=out, existing="same").result(180).step == 1
        with pytest.raises((AlreadyCommitted, StateMismatch)):
            checkpointer.save(1, existing="same", wait="durable")
        under_way.result(180)
        with pytest.raises(AlreadyCommitted) as told:
            checkpointer.save(1, existing="same")
        assert "exclude=" in told.value.hint
        checkpointer.save(1, exclude=out, existing="same", wait="durable")
        checkpointer.save(1, existing="replace", wait="durable")
        checkpointer.save(1, existing="same", wait="durable")
        checkpointer.restore(1)


def test_an_optimizer_with_every_third_save(daemon: RunningDaemon, run: str) -> None:
    """A restart goes on from the newest step that has it, bit for bit; retention keeps that one; no step without it is
    resumed with a stale optimizer.
    """
    state = mixed(1)
    kept: dict[int, list[torch.Tensor]] = {}
    rhythm = {"optim": 3, "master": 3}
    with Checkpointer(run, state, at=daemon.socket, keep_last=1) as checkpointer:
        for step in range(1, 6):
            state["optim"].step()
            ticket = checkpointer.save(step, every=rhythm, wait="durable")
            kept[step] = copied(state)
            assert ("optim" in ticket.groups) == (step in (1, 4)) and bool(ticket.notes) == (step not in (1, 4))
    with Api(daemon.url) as api:
        wait_until(lambda: {one.step for one in api.checkpoints(run)} == {4, 5})
    live = mixed(9)
    with Checkpointer(run, live, at=daemon.socket) as checkpointer:
        before = copied(live)
        with pytest.raises(StateMismatch, match=r"optim"):
            checkpointer.restore(5)
        assert all(map(torch.equal, before, copied(live)))
        assert checkpointer.restore() == 4
        assert all(map(torch.equal, kept[4], copied(live)))
        live["optim"].step()
        checkpointer.save(5, every=rhythm, wait="durable")  # in the place of the one without an optimizer
        assert all(map(torch.equal, kept[5], copied(live)))


def test_random_streams_go_on(daemon: RunningDaemon, run: str) -> None:
    """What a generator in the state draws after the restore is what it drew after the save."""
    state = mixed(1)
    torch.rand(3, generator=state["shuffle"])
    with Checkpointer(run, state, at=daemon.socket) as checkpointer:
        checkpointer.save(1)
        expected = torch.rand(9, generator=state["shuffle"])
        checkpointer.save(2, wait="durable")
        checkpointer.restore(1)
        assert torch.equal(torch.rand(9, generator=state["shuffle"]), expected)


def test_patterns_are_a_sequence(daemon: RunningDaemon, run: str) -> None:
    """A text would be taken letter by letter."""
    with Checkpointer(run, mixed(1), at=daemon.socket) as checkpointer:
        for call in (checkpointer.restore, lambda **kw: checkpointer.save(1, **kw)):
            with pytest.raises(InvalidRequest, match="exclude must be a sequence of patterns"):
                call(exclude="model/x")
