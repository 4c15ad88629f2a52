"""`Checkpointer(ema=Ema(…))` against a real daemon: what torch's own average would be, and everything that is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from holdfast import Api, Checkpointer, Ema
from holdfast.read.root_directory import open_checkpoint
from holdfast_formats.errors import InvalidRequest, LimitExceeded, StateMismatch
from tests.daemons import RunningDaemon, running, wait_until
from tests.kit.ranks import World

SEALED_S = 20.0  # the daemon waits for 30 s for slots that are in the way
WEIGHTS = Ema(decay=0.9, of="model", every=1, correction="none")


class Trainer:
    """A small model that is trained one step at a time, always with the same batches."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.averaged = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.state: dict[str, Any] = {"model": self.model, "optim": self.optim}

    def train(self, steps: range, checkpointer: Checkpointer, after: Callable[[int], object] = bool) -> None:
        for step in steps:
            torch.manual_seed(step)
            self.optim.zero_grad()
            self.model(torch.randn(5, 4)).sum().backward()
            if checkpointer._averaging is not None:
                wait_until(lambda: checkpointer.ema.ready)
            self.optim.step()
            after(step)
            self.averaged.update_parameters(self.model)


def stored(daemon: RunningDaemon, run: str, step: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What a checkpoint says of its average, and the average."""
    with open_checkpoint(daemon.root, None, run, step) as reader:
        said = json.loads(reader.state)["groups"]["ema"]["average"]["all"]
        names = reader.manifest.tensors["ema"]
        return said, {name: torch.from_numpy(reader.read("ema", name).copy()) for name in names}


def test_it_is_the_average_that_torch_keeps(daemon: RunningDaemon, run: str) -> None:
    """Parameters are averaged, buffers are the last ones; after a restart it goes on, from memory or from files."""
    trainer = Trainer()
    with Checkpointer(run, trainer.state, at=daemon.socket, ema=WEIGHTS) as checkpointer:
        assert checkpointer.restore() == 0
        trainer.train(range(1, 11), checkpointer)
        checkpointer.save(10)
    again = Trainer()
    again.averaged = trainer.averaged
    with Checkpointer(run, again.state, at=daemon.socket, ema=WEIGHTS) as checkpointer:
        assert checkpointer.restore() == 10
        assert checkpointer.last_restore is not None and checkpointer.last_restore.notes == ()
        again.train(range(11, 15), checkpointer)
        checkpointer.save(14)
        wait_until(lambda: checkpointer.ema.n == 14)
        with Api(daemon.url) as api:
            kept = [one for node in api.nodes() for one in node.averages if one.run == run]
            page = httpx.get(f"{daemon.url}/runs/{run}", trust_env=False).text
    assert [(one.attempt, one.of, one.n, one.left_out) for one in kept] == [(2, "model", 14, 0)]
    assert "Average of model" in page and "14 updates" in page
    said, found = stored(daemon, run, 14)
    assert said == {
        "of": "model",
        "decay": 0.9,
        "every": 1,
        "correction": "none",
        "n": 14,
        "step": 14,
        "dropped": 0,
        "skipped": 0,
        "lost": 0,
    }
    expected = again.averaged.module.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_every_tenth_step_counts_from_the_restored_one(daemon: RunningDaemon, run: str) -> None:
    """A restart changes nothing about which steps are averaged, and the corrected average is usable at once."""
    trainer = Trainer()
    ema = Ema(decay=0.99, of="model", every=4)
    with Checkpointer(run, trainer.state, at=daemon.socket, ema=ema) as checkpointer:
        trainer.train(range(1, 7), checkpointer)
        checkpointer.save(6)
    said, found = stored(daemon, run, 6)
    assert (said["n"], said["step"]) == (1, 4)
    again = Trainer()
    with Checkpointer(run, again.state, at=daemon.socket, ema=ema) as checkpointer:
        assert checkpointer.restore() == 6
        again.train(range(7, 10), checkpointer)
        checkpointer.save(9)
    said, later = stored(daemon, run, 9)
    assert (said["n"], said["step"]) == (2, 8)
    assert not torch.equal(found["0.weight"], later["0.weight"])


def test_masters_of_half_precision_weights(daemon: RunningDaemon, run: str) -> None:
    """The group that is averaged has masters; the average is in F32 under their names."""
    masters = {"w": torch.ones(3), "b": torch.zeros(2)}
    state = {
        "model": {"w": torch.ones(3, dtype=torch.bfloat16), "b": torch.zeros(2, dtype=torch.bfloat16)},
        "master": masters,
    }
    with Checkpointer(run, state, at=daemon.socket, ema=Ema(decay=0.5, every=1), fenced=True) as checkpointer:
        for value in (1.0, 2.0):
            checkpointer.fence()
            masters["w"].fill_(value)
            wait_until(lambda: checkpointer.ema.ready)
            checkpointer.ema.update()
        checkpointer.save(2)
    said, found = stored(daemon, run, 2)
    assert said["of"] == "master" and found["w"].dtype == torch.float32
    assert torch.allclose(found["w"], torch.full((3,), (0.5 * 1 + 2) / 1.5))


def test_half_precision_weights_are_widened(daemon: RunningDaemon, run: str) -> None:
    """Without masters the weights themselves are averaged, in F32."""
    weights = {"w": torch.full((5,), 1.5, dtype=torch.bfloat16)}
    with Checkpointer(run, {"model": weights}, at=daemon.socket, ema=WEIGHTS, fenced=True) as checkpointer:
        checkpointer.ema.update()
        checkpointer.save(1)
    _, found = stored(daemon, run, 1)
    assert torch.equal(found["w"], torch.full((5,), 1.5))
    with Checkpointer(run, {"model": weights}, at=daemon.socket, ema=WEIGHTS, fenced=True) as checkpointer:
        assert checkpointer.restore() == 1
        assert checkpointer.ema.n == 1  # at once: the first update after a restore finds its place free
        assert checkpointer.ema.step == 1


def test_a_daemon_that_is_slow_costs_updates_and_no_time(daemon: RunningDaemon, run: str) -> None:
    """What comes while the last update is not folded is dropped, and counted in the checkpoint."""
    trainer = Trainer()
    with Checkpointer(run, trainer.state, at=daemon.socket, ema=WEIGHTS) as checkpointer:
        trainer.train(range(1, 3), checkpointer)
        wait_until(lambda: checkpointer.ema.n == 2)
        daemon.freeze()
        try:
            for _ in range(5):
                trainer.optim.step()
        finally:
            daemon.thaw()
        wait_until(lambda: checkpointer.ema.ready)
        checkpointer.save(7)
    said, _ = stored(daemon, run, 7)
    assert said["n"] + said["dropped"] == 7
    assert 3 <= said["dropped"] <= 4


def test_steps_with_a_large_loss_are_left_out(daemon: RunningDaemon, run: str) -> None:
    """Then every step is told with its loss; one that is no number counts as large."""
    trainer = Trainer()
    ema = Ema(decay=0.9, of="model", every=2, loss_above=3.0)
    losses = [1.0, 2.0, 9.0, 9.0, 1.0, float("nan"), 9.0, 3.0]
    with Checkpointer(run, trainer.state, at=daemon.socket, ema=ema) as checkpointer:
        trainer.train(range(1, 9), checkpointer, lambda step: checkpointer.ema.update(loss=losses[step - 1]))
        with pytest.raises(InvalidRequest, match="needs loss="):
            checkpointer.ema.update()
        checkpointer.save(8)
    said, _ = stored(daemon, run, 8)
    assert (said["n"], said["skipped"], said["dropped"], said["step"]) == (2, 2, 0, 8)


def test_a_save_without_the_average_is_told(daemon: RunningDaemon, run: str) -> None:
    """No update is in it yet, since the only one was left out."""
    trainer = Trainer()
    ema = Ema(decay=0.9, of="model", every=1, loss_above=1.0)
    with Checkpointer(run, trainer.state, at=daemon.socket, ema=ema) as checkpointer:
        trainer.train(range(1, 2), checkpointer, lambda step: checkpointer.ema.update(loss=9.0))
        checkpointer.save(1, wait="durable")
    asked = f"{daemon.url}/v1/events?run={run}&kind=average-left-out"
    wait_until(lambda: len(httpx.get(asked, trust_env=False).raise_for_status().json()["items"]) == 1)
    with open_checkpoint(daemon.root, None, run, 1) as reader:
        assert "ema" not in reader.manifest.groups and reader.verify() == []


def test_a_save_has_the_group_that_was_asked_for(daemon: RunningDaemon, run: str) -> None:
    """It is left out and chosen as other groups are, and is not there before the first update."""
    trainer = Trainer()
    with Checkpointer(run, trainer.state, at=daemon.socket, ema=Ema(decay=0.9, of="model", every=3)) as checkpointer:
        trainer.train(range(1, 3), checkpointer)
        assert "ema" not in checkpointer.save(2, wait="durable").groups
        trainer.train(range(3, 4), checkpointer)
        assert "ema" not in checkpointer.save(3, groups=("model",), wait="durable").groups
        assert checkpointer.save(4, groups=("model", "ema"), wait="durable").groups == ("model", "ema")
        rare = {"ema": 2}
        assert "ema" in checkpointer.save(5, every=rare, wait="durable").groups
        assert "ema" not in checkpointer.save(6, every=rare, wait="durable").groups
    for step, there in ((2, False), (3, False), (4, True), (5, True), (6, False)):
        with open_checkpoint(daemon.root, None, run, step) as reader:
            assert ("ema" in reader.manifest.groups) is there
            assert reader.verify() == []


def test_what_a_restart_finds_different_is_said(daemon: RunningDaemon, run: str) -> None:
    """Another decay goes on with the same average, a checkpoint without one starts again; both are in the notes."""
    trainer = Trainer()
    with Checkpointer(run, trainer.state, at=daemon.socket, ema=WEIGHTS) as checkpointer:
        trainer.train(range(1, 3), checkpointer)
        checkpointer.save(2, wait="durable")
        checkpointer.save(3, groups=("model", "optim", "extra"), wait="durable")
    other = Ema(decay=0.95, of="model", every=1, correction="none")
    with Checkpointer(run, Trainer().state, at=daemon.socket, ema=other) as checkpointer:
        checkpointer.restore(2)
        assert checkpointer.last_restore is not None
        assert "decay was 0.9, and is 0.95 now" in "".join(checkpointer.last_restore.notes)
        wait_until(lambda: checkpointer.ema.n == 2)
        checkpointer.restore(3)
        assert "starts again" in "".join(checkpointer.last_restore.notes)
        wait_until(lambda: checkpointer.ema.n == 0)


def test_other_tensors_than_before_are_refused_by_name(daemon: RunningDaemon, run: str) -> None:
    """Within a launch, and in the checkpoint that a launch restores."""
    weights = {"w": torch.ones(3)}
    with Checkpointer(run, {"model": weights}, at=daemon.socket, ema=WEIGHTS, fenced=True) as checkpointer:
        checkpointer.ema.update()
        checkpointer.save(1, wait="durable")
        weights["new"] = torch.ones(2)
        with pytest.raises(StateMismatch, match="model/new"):
            checkpointer.ema.update()
    trained = {"model": {"w": torch.ones(3), "new": torch.ones(2)}}
    checkpointer = Checkpointer(run, trained, at=daemon.socket, ema=WEIGHTS, fenced=True)
    with checkpointer, pytest.raises(StateMismatch, match="new"):
        checkpointer.restore(strict=False)


def test_what_cannot_be_averaged_is_refused_by_name(daemon: RunningDaemon, run: str) -> None:
    """An average of the user's own, masters that there are none of, doubles, and counting twice."""
    trainer = Trainer()
    with pytest.raises(InvalidRequest, match="group 'ema'"):
        Checkpointer(run, {**trainer.state, "ema": {"w": torch.ones(1)}}, at=daemon.socket, ema=WEIGHTS)
    with (
        Checkpointer(run, trainer.state, at=daemon.socket, ema=WEIGHTS) as checkpointer,
        pytest.raises(InvalidRequest, match="counted already"),
    ):
        checkpointer.ema.update()
    doubles = {"model": {"w": torch.ones(3, dtype=torch.float64)}}
    checkpointer = Checkpointer(run, doubles, at=daemon.socket, ema=WEIGHTS)
    with checkpointer, pytest.raises(InvalidRequest, match="model/w"):
        checkpointer.ema.update()
    without = Checkpointer(run, doubles, at=daemon.socket)
    with without, pytest.raises(InvalidRequest, match="has no average"):
        _ = without.ema


class Own(torch.optim.AdamW):
    """Of the user's own, so that it may make masters in its first step, as apex does."""


@pytest.mark.parametrize("of", ["master", "modle"])
def test_a_group_that_is_not_there_is_refused_as_soon_as_that_is_known(daemon: RunningDaemon, run: str, of: str) -> None:
    """At once, with what to average; of optimizers that may make masters, after the first step."""
    trainer = Trainer()
    with pytest.raises(InvalidRequest, match=f"'{of}'.* no tensor in this group") as refused:
        Checkpointer(run, trainer.state, at=daemon.socket, ema=Ema(of=of))
    assert "model" in refused.value.hint
    without = Checkpointer(run, {"model": trainer.model}, at=daemon.socket, ema=Ema(of=of))
    with without, pytest.raises(InvalidRequest, match="no tensor in this group"):
        without.ema.update()
    if of == "master":
        trainer.optim = trainer.state["optim"] = Own(trainer.model.parameters())
        later = Checkpointer(run, trainer.state, at=daemon.socket, ema=Ema(of=of, every=10))
        with later, pytest.raises(InvalidRequest, match="no tensor in this group"):
            trainer.train(range(1, 2), later)


@pytest.mark.parametrize(
    "options",
    [
        {"decay": 1.0},
        {"decay": True},
        {"every": 0},
        {"every": 2.5},
        {"correction": "both"},
        {"of": "optim"},
        {"loss_above": float("nan")},
        {"loss_above": "3"},
        {"loss_above": True},
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], run: str, tmp_path: Path) -> None:
    """Before anything is contacted, by the option's name."""
    with pytest.raises(InvalidRequest, match=next(iter(options))):
        Checkpointer(run, {"model": {"w": torch.ones(1)}}, at=tmp_path, ema=Ema(**options))


@pytest.mark.parametrize("ema", [{"decay": 0.9}, 0.999, True, Ema])
def test_what_is_no_average_is_refused(ema: Any, run: str, tmp_path: Path) -> None:
    """A mapping of the options, a number or the class itself, with what to write instead."""
    with pytest.raises(InvalidRequest, match=r"ema=.* is not an Ema") as caught:
        Checkpointer(run, {"model": {"w": torch.ones(1)}}, at=tmp_path, ema=ema)
    assert "holdfast.Ema(" in caught.value.hint


def test_ranks_that_train_apart_have_no_average(daemon: RunningDaemon, run: str) -> None:
    """They agree again when they save, but not in what was averaged: none of theirs is the average. The save is whole."""
    states: list[dict[str, Any]] = [{"model": {"w": torch.ones(300)}} for _ in (0, 1)]
    world = World(daemon, run, states, ema=WEIGHTS)

    def update() -> None:
        for rank in world.ranks:
            rank.ema.update()
        wait_until(lambda: all(rank.ema.ready for rank in world.ranks))

    update()
    assert world.save(1) == [None] * 2
    states[1]["model"]["w"].fill_(5)
    update()
    states[1]["model"]["w"].fill_(1)
    assert world.save(2) == [None] * 2
    tickets = [rank.save(3) for rank in world.ranks]
    for ticket in tickets:
        ticket.result(180)
        assert "ema" not in ticket.groups and "model" in ticket.groups
        assert any("without the group ema" in note for note in ticket.notes)
    world.close()
    groups = []
    for step in (1, 2):
        with open_checkpoint(daemon.root, None, run, step) as reader:
            groups.append(reader.manifest.groups)
    assert [("ema" in one, "model" in one) for one in groups] == [(True, True), (False, True)]
    asked = f"{daemon.url}/v1/events?run={run}&kind=average-left-out"
    wait_until(lambda: len(httpx.get(asked, trust_env=False).raise_for_status().json()["items"]) == 2)
    told = httpx.get(asked, trust_env=False).json()["items"]
    assert [one["step"] for one in told] == [3, 2] and "must be equal" in told[0]["text"]
    assert "ema/w on rank 1 differs" in daemon.log.read_text()


@pytest.mark.parametrize("by", ["prepare", "save", "larger save"])
def test_slots_do_not_take_the_memory_of_the_average(tmp_path: Path, run: str, by: str) -> None:
    """Slots are asked for first, and at the same moment: a state is averaged if the average fits, and what is refused stays
    so as it grows.
    """
    averaged: list[bool] = []
    with running(tmp_path / "root", "--arena-bytes-max", "3000000") as daemon:
        for width in (50, 100, 120, 400):
            model = nn.Linear(1000, width)
            optim = torch.optim.SGD(model.parameters(), lr=0.1)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            state = {"model": model, "optim": optim}
            with Checkpointer(f"{run}-{width}", state, at=daemon.socket, ema=WEIGHTS) as checkpointer:
                checkpointer.restore()
                if by != "save":
                    checkpointer.prepare(wait=True)
                if by != "prepare":
                    checkpointer.save(0, assets={"notes": bytes(1_000_000 if by == "larger save" else 1)}, wait="durable")
                try:
                    optim.step()
                except LimitExceeded:
                    averaged.append(False)
                    continue
                averaged.append(True)
                checkpointer.save(1, wait="durable")
                assert stored(daemon, f"{run}-{width}", 1)[0]["n"] == 1
    assert averaged == [True, True, True, False]


def test_slots_of_one_rank_do_not_take_the_memory_of_another_ranks_average(tmp_path: Path, run: str) -> None:
    """Ranks of one launch reserve one after the other: the first one leaves room for the averages of all."""
    states = []
    for _ in range(2):
        model = nn.Linear(1000, 50)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        states.append({"model": model, "optim": optim})
    with running(tmp_path / "root", "--arena-bytes-max", "4500000") as daemon:
        world = World(daemon, run, states, slots=8, ema=WEIGHTS)
        world.restore()
        world.ranks[0].prepare(wait=True)
        for state in states:
            state["optim"].step()
        wait_until(lambda: all(rank.ema.ready for rank in world.ranks))
        world.close()


def test_slots_that_are_prepared_while_a_save_is_copied_do_not_hold_it_up(tmp_path: Path, run: str) -> None:
    """There is no room for new slots beside those that the save is in: they are asked for when it is sealed, since the
    daemon answers nothing else of the rank meanwhile, the seal included.
    """
    model = nn.Linear(4000, 4000)
    state = {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1)}
    with (
        running(tmp_path / "root", "--arena-bytes-max", "150000000") as daemon,
        Checkpointer(run, state, at=daemon.socket, slots=1, ema=WEIGHTS) as checkpointer,
    ):
        ticket = checkpointer.save(1)  # without an average, for which `prepare` asks for room
        checkpointer.prepare()
        assert ticket.result(SEALED_S) is not None
