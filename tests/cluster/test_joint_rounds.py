"""Four nodes save one checkpoint together, again and again, and in every round a daemon is killed at some moment.

At most the round is lost in which it is killed, for all ranks alike; the next save commits; what is committed is right.
"""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest

from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.storage.posix import PosixTier
from tests.regressions.joint_worlds import ranks
from tests.regressions.test_many_daemons import Daemon, Site, site, steps

__all__ = ["site"]
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("forked_programs"),
    pytest.mark.filterwarnings("ignore::holdfast.SaveWarning"),  # of saves that a kill has ended
]

NODES = ("a", "b", "c", "d")
LATEST_S = 0.6  # after the save began, a daemon is killed by then


def test_a_daemon_is_killed_in_every_round(site: Site, request: pytest.FixtureRequest) -> None:
    """All ranks hear the same of every round, and every second one, in which nobody is killed, commits."""
    rounds = int(request.config.getoption("--cluster-rounds"))
    chance = random.Random(request.config.getoption("--cluster-seed"))
    daemons = {name: site.start(name) for name in NODES}
    ends: Counter[str] = Counter()
    committed: list[int] = []
    longest_s = 0.0
    with ranks("run", [daemons[name] for name in NODES], "killed", slots=3) as world:
        for number in range(rounds):
            step = 2 * number + 1
            began = time.monotonic()
            tickets = world.save(step, wait=None)
            longest_s = max(longest_s, time.monotonic() - began)
            victim = chance.choice(NODES)
            time.sleep(chance.uniform(0.0, LATEST_S))
            daemons[victim].kill()
            daemons[victim] = site.start(victim)
            heard = {how_it_ended(ticket) for ticket in tickets}
            assert len(heard) == 1, (step, heard)
            end = heard.pop()
            ends[end] += 1
            stands = step in steps(site.root, "run")
            assert stands == (end == "committed"), (step, end)
            for ticket in world.save(step + 1):
                ticket.result()
            committed += [step] * stands + [step + 1]
    print(f"\n{rounds} rounds with a kill: {dict(ends)}; longest save() {longest_s:.3f} s", flush=True)
    assert steps(site.root, "run") == committed
    for step in committed:
        verify(PosixTier(site.root), naming.checkpoint_path("run", step))
    restores(daemons, committed)


def how_it_ended(ticket: object) -> str:
    try:
        ticket.result(120)  # type: ignore[attr-defined]
    except CheckpointError as error:
        return error.code
    return "committed"


def restores(daemons: dict[str, Daemon], committed: list[int]) -> None:
    with ranks("run", [daemons["a"], daemons["c"], daemons["d"]], "after") as world:
        for step in (committed[-1], committed[len(committed) // 2]):
            assert set(world.each(lambda rank, one: one.restore(step=step))) == {step}  # noqa: B023 - used at once
            world.check(step)
