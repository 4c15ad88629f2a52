"""PostgreSQL goes away in the middle of a training of two nodes, for as long as `--cluster-away-s` says: no step of training
waits for it, and the newest step of all ranks is committed soon after it is back.

What a step is: the same arithmetic each time, `save()`, and `fence()`. Beside each stands one that saves nothing, so what
the machine does meanwhile is seen as well.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import pytest
import torch

from holdfast import Checkpointer
from holdfast_formats import naming
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.storage.posix import PosixTier
from tests.cluster.test_joint_rounds import how_it_ended
from tests.daemons import wait_until
from tests.regressions.joint_worlds import ranks
from tests.regressions.test_many_daemons import Site, site, steps

__all__ = ["site"]
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.cluster_slow,
    pytest.mark.usefixtures("forked_programs"),
    pytest.mark.filterwarnings("ignore::holdfast.SaveWarning"),  # of saves that gave way to newer ones
]

SAVES = 100
BEFORE = 20  # saves with PostgreSQL
BETWEEN_S = 1.0  # two of those
WIDTH, TIMES = 384, 12  # of the matrices of a step


class Steps(NamedTuple):
    """What the steps of all ranks took, and what they would have without a save."""

    saving: list[float]
    bare: list[float]

    def told(self) -> str:
        """In milliseconds: what a save adds to a step."""
        added = sorted(1000 * (with_it - without) for with_it, without in zip(self.saving, self.bare, strict=True))
        bare = sorted(1000 * one for one in self.bare)
        tenth = added[len(added) * 9 // 10]
        return (
            f"{len(added)} steps of {statistics.median(bare):.1f} ms (longest without a save {bare[-1]:.1f}): a save adds "
            f"{statistics.median(added):.1f} ms, nine of ten at most {tenth:.1f}, longest {added[-1]:.1f}"
        )


def test_training_does_not_feel_it(site: Site, request: pytest.FixtureRequest) -> None:
    """A hundred saves, most of them while PostgreSQL is away."""
    away_s = float(request.config.getoption("--cluster-away-s"))
    a, b = site.start("a"), site.start("b")
    with_it, without = Steps([], []), Steps([], [])
    ended: dict[str, int] = {}
    torch.set_num_threads(1)
    with ranks("run", [a, b], "first", slots=2) as world:

        def step(number: int, into: Steps, wait_s: float) -> list[Any]:
            world.set(number)
            time.sleep(wait_s)
            into.bare.extend(world.each(lambda rank, one: _compute()))
            made = world.each(lambda rank, one: _step(one, number))
            into.saving.extend(seconds for seconds, _ in made)
            return [ticket for _, ticket in made]

        for number in range(1, BEFORE + 1):
            for ticket in step(number, with_it, min(BETWEEN_S, away_s / (SAVES - BEFORE))):
                ticket.result()
        site.postgres.stop()
        tickets = [step(number, without, away_s / (SAVES - BEFORE)) for number in range(BEFORE + 1, SAVES + 1)]
        site.postgres.start()
        began = time.monotonic()
        wait_until(lambda: steps(site.root, "run")[-1] == SAVES)
        back_s = time.monotonic() - began
        for saved in tickets:
            heard = {how_it_ended(ticket) for ticket in saved}
            assert len(heard) == 1, heard
            end = heard.pop()
            ended[end] = ended.get(end, 0) + 1
        for ticket in world.save(SAVES + 1):
            ticket.result()
        world.set(0)
        assert set(world.each(lambda rank, one: one.restore(step=SAVES))) == {SAVES}
        world.check(SAVES)
    print(f"\nwith PostgreSQL:    {with_it.told()}\nwithout, for {away_s:.0f} s: {without.told()}", flush=True)
    print(f"step {SAVES} committed {back_s:.1f} s after it was back; {ended}", flush=True)
    assert ended["committed"] >= 1 and set(ended) <= {"committed", "generation-dropped"}
    for found in steps(site.root, "run"):
        verify(PosixTier(site.root), naming.checkpoint_path("run", found))


def _compute() -> float:
    """The arithmetic of one step; its seconds."""
    began = time.monotonic()
    made = torch.eye(WIDTH)
    for _ in range(TIMES):
        made = made @ made
    return time.monotonic() - began


def _step(one: Checkpointer, number: int) -> tuple[float, Any]:
    """A whole step with its save; its seconds, and the ticket."""
    began = time.monotonic()
    _compute()
    ticket = one.save(number)
    one.fence()
    return time.monotonic() - began, ticket
