"""The daemons of several nodes keep one average: of the same updates on all of them, whatever becomes of a node."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from holdfast import Checkpointer, Ema, Fragment
from holdfast.launch import Launch, assigned
from holdfast.read.root_directory import open_checkpoint
from tests.daemons import wait_until
from tests.regressions.test_many_daemons import Daemon, Site, site

__all__ = ["site"]
pytestmark = pytest.mark.usefixtures("forked_programs")
SIZE, DECAY = 40_009, 0.9
RUN = "run"
EMA = Ema(decay=DECAY, of="master", every=1, correction="none")


def values(step: int, size: int = SIZE) -> dict[str, torch.Tensor]:
    """The masters of a step: one is cut over all ranks, one is the same on all."""
    made = torch.Generator().manual_seed(step)
    return {"cut": torch.randn(size, generator=made), "alike": torch.randn(33, generator=made)}


class _Masters(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.cut, self.alike = nn.Parameter(torch.zeros(size)), nn.Parameter(torch.zeros(33))


def expected(steps: Sequence[int], size: int = SIZE) -> dict[str, torch.Tensor]:
    """What torch's own average of these steps is."""
    model = _Masters(size)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in steps:
        for name, value in values(step, size).items():
            getattr(model, name).data.copy_(value)
        averaged.update_parameters(model)
    return {name: getattr(averaged.module, name).data for name in ("cut", "alike")}


class World:
    """The ranks of a launch, in this process: rank r is at `places[r]`."""

    def __init__(self, places: Sequence[Daemon], name: str, ema: Ema = EMA, size: int = SIZE) -> None:
        self.size = size
        self.held: list[dict[str, torch.Tensor]] = []
        self.checkpointers: list[Checkpointer] = []
        world = len(places)
        for rank, daemon in enumerate(places):
            begin, end = size * rank // world, size * (rank + 1) // world
            mine = {"cut": torch.zeros(end - begin), "alike": torch.zeros(33)}
            whole: dict[str, Any] = {**mine, "cut": Fragment(mine["cut"], (size,), offset=(begin,))}
            launch = Launch(rank, world, name, 1)
            with assigned(lambda launch=launch: launch):
                made = Checkpointer(RUN, {"master": whole}, at=daemon.socket, ema=ema, fenced=True)
            self.held.append(mine)
            self.checkpointers.append(made)

    def train(self, step: int, losses: Sequence[float] = (), apart: Collection[int] = ()) -> None:
        """One step of all ranks, whether or not their last update is folded. The ranks `apart` bring something else of what
        all hold alike, and hold the same again afterwards.
        """
        world = len(self.held)
        for rank, (mine, one) in enumerate(zip(self.held, self.checkpointers, strict=True)):
            one.fence()
            found = values(step, self.size)
            mine["cut"].copy_(found["cut"][self.size * rank // world : self.size * (rank + 1) // world])
            mine["alike"].copy_(found["alike"] + (rank in apart))
            one.ema.update(**({"loss": losses[rank]} if losses else {}))
            if rank in apart:
                one.fence()
                mine["alike"].copy_(found["alike"])

    def settle(self, n: int) -> None:
        """Wait until all that was brought is dealt with, and so many updates are in the average of every rank."""
        wait_until(lambda: all(one.ema.ready and one.ema.n == n for one in self.checkpointers))

    def save(self, step: int) -> list[Any]:
        return [one.save(step) for one in self.checkpointers]

    def restore(self, step: int | None = None) -> list[int]:
        """Restore on all ranks at once."""
        with ThreadPoolExecutor(len(self.checkpointers)) as pool:
            return list(pool.map(lambda one: one.restore(step), self.checkpointers))

    def close(self) -> None:
        for one in self.checkpointers:
            one.close()


def check(site: Site, step: int, averaged: Sequence[int], size: int = SIZE, **said: int) -> None:
    """A checkpoint has the average of exactly these steps, and says so."""
    with open_checkpoint(site.root, None, RUN, step) as reader:
        assert reader.verify() == []
        (state,) = json.loads(reader.state)["groups"]["ema"]["average"].values()  # one for all ranks
        assert (state["n"], state["step"]) == (len(averaged), averaged[-1])
        assert {name: state[name] for name in said} == said
        for name, value in expected(averaged, size).items():
            assert torch.equal(torch.from_numpy(reader.read("ema", name).copy()), value), name


def test_nodes_keep_one_average_and_any_world_goes_on_with_it(site: Site) -> None:
    """A daemon is killed in between; then the launch goes on with other ranks on other nodes, and on one alone."""
    a, b = site.start("a"), site.start("b")
    world = World([a, a, b, b], "first")
    for step in range(1, 7):
        world.train(step)
        if step == 4:
            b.kill()
            b = site.start("b")
        world.settle(step)
        if step in (3, 6):
            for ticket in world.save(step):
                ticket.result(180)
                assert "ema" in ticket.groups
    world.close()
    check(site, 3, range(1, 4), dropped=0, lost=0)
    check(site, 6, range(1, 7), dropped=0, lost=0)
    world = World([b, a], "second")
    assert world.restore() == [6, 6]
    for step in (7, 8):
        world.train(step)
        world.settle(step)
    for ticket in world.save(8):
        ticket.result(180)
    world.close()
    check(site, 8, range(1, 9), dropped=0, lost=0)
    world = World([b], "third")
    assert world.restore() == [8]
    world.train(9)
    world.settle(9)
    for ticket in world.save(9):
        ticket.result(180)
    world.close()
    check(site, 9, range(1, 10), dropped=0, lost=0)


def test_what_one_node_leaves_out_is_left_out_by_all(site: Site) -> None:
    """By its loss on one rank alone; and while the catalog is away, when nobody can agree and no rank waits for that."""
    a, b = site.start("a"), site.start("b")
    world = World([a, b], "first", Ema(decay=DECAY, of="master", every=1, correction="none", loss_above=2.0))
    world.train(1, [1.0, 1.0])
    world.settle(1)
    world.train(2, [1.0, 9.0])
    world.settle(1)
    world.train(3, [1.0, 1.0])
    world.settle(2)
    site.postgres.stop()
    for step in (4, 5, 6):
        world.train(step, [1.0, 1.0])
    tickets = world.save(6)
    site.postgres.start()
    for ticket in tickets:
        ticket.result(180)
    world.settle(3)
    check(site, 6, [1, 3, 4], dropped=3)
    world.train(7, [1.0, 1.0])
    world.settle(4)
    for ticket in world.save(7):
        ticket.result(180)
    world.close()
    check(site, 7, [1, 3, 4, 7], dropped=3)
