"""PostgreSQL goes away in the middle of a training of two nodes, for as long as `--cluster-away-s` says: no step of training
waits for it, and the newest step of all ranks is committed soon after it is back.
"""

from __future__ import annotations

import statistics
import time

import pytest

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
    pytest.mark.usefixtures("forked_programs"),
    pytest.mark.filterwarnings("ignore::holdfast.SaveWarning"),  # of saves that gave way to newer ones
]

SAVES = 100
BEFORE = 20  # saves with PostgreSQL
BACK_S = 10.0


def test_training_does_not_feel_it(site: Site, request: pytest.FixtureRequest) -> None:
    """A hundred saves, most of them while PostgreSQL is away."""
    away_s = float(request.config.getoption("--cluster-away-s"))
    a, b = site.start("a"), site.start("b")
    seconds: list[float] = []
    ended: dict[str, int] = {}
    with ranks("run", [a, b], "first", slots=2) as world:

        def save(step: int) -> list[object]:
            world.set(step)
            began = time.monotonic()
            made = world.each(lambda rank, one: one.save(step))
            seconds.append(time.monotonic() - began)
            return made

        for step in range(1, BEFORE + 1):
            for ticket in save(step):
                ticket.result()  # type: ignore[attr-defined]
        site.postgres.stop()
        tickets = []
        for step in range(BEFORE + 1, SAVES + 1):
            time.sleep(away_s / (SAVES - BEFORE))
            tickets.append(save(step))
        site.postgres.start()
        began = time.monotonic()
        wait_until(lambda: steps(site.root, "run")[-1] == SAVES, 60)
        back_s = time.monotonic() - began
        for saved in tickets:
            heard = {how_it_ended(ticket) for ticket in saved}
            assert len(heard) == 1, heard
            end = heard.pop()
            ended[end] = ended.get(end, 0) + 1
        for ticket in save(SAVES + 1):
            ticket.result()  # type: ignore[attr-defined]
        world.set(0)
        assert set(world.each(lambda rank, one: one.restore(step=SAVES))) == {SAVES}
        world.check(SAVES)
    with_it, without = seconds[1:BEFORE], seconds[BEFORE:SAVES]
    print(
        f"\naway for {away_s:.0f} s: save() on both nodes {_told(with_it)} with it, {_told(without)} without; "
        f"step {SAVES} committed {back_s:.1f} s after it was back; {ended}",
        flush=True,
    )
    assert back_s < BACK_S and ended["committed"] >= 1 and set(ended) <= {"committed", "generation-dropped"}
    for step in steps(site.root, "run"):
        verify(PosixTier(site.root), naming.checkpoint_path("run", step))


def _told(found: list[float]) -> str:
    return f"median {1000 * statistics.median(found):.1f} ms, longest {1000 * max(found):.1f} ms"
