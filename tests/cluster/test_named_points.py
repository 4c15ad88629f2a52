"""Four nodes save one checkpoint together, and a daemon is killed at each named point of a joint save, again and again.

At most the round is lost in which it is killed, for all ranks alike; the next save commits; what is committed is right.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast_formats import naming
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.storage.posix import PosixTier
from tests.cluster.test_joint_rounds import NODES, how_it_ended, restores
from tests.crash.points import STOPS
from tests.daemons import wait_until
from tests.regressions.joint_worlds import Ranks, ranks
from tests.regressions.test_many_daemons import Daemon, Site, site, steps

__all__ = ["site"]
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.cluster_slow,
    pytest.mark.filterwarnings("ignore::holdfast.SaveWarning"),  # of saves that a kill has ended
]

EARLY = ("before arriving", "arrived", "before the round is sealed", "the round is sealed")
EXCHANGING = ("bytes asked for", "bytes sent without their digest", "bytes brought")
WRITING = ("before planning", *EXCHANGING, "mid share", "share written", "before delivering", "delivered")
SMALL = ("between two small files", "before the joint COMMIT")
COMMITTING = ("claimed", "before the joint manifest", *SMALL, "before rename", "after rename")
LAST = ("before the end is told", "the end is told")
POINTS = (*EARLY, *WRITING, *COMMITTING, *LAST)
WITHOUT_IT_S = 60.0  # the lease of who has claimed lasts 30 s


class Marks:
    """Where a daemon that has come to the armed point leaves its mark."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir()

    def arm(self, point: str) -> None:
        (self._directory / "hit").unlink(missing_ok=True)
        (self._directory / "armed").write_text(point)

    def victim(self, daemons: dict[str, Daemon]) -> str:
        """The node whose daemon waits at the point; nobody else stops there."""
        wait_until(lambda: self._hit.endswith("\n"))
        (self._directory / "armed").unlink()
        return next(name for name, daemon in daemons.items() if daemon.process.pid == int(self._hit))

    @property
    def _hit(self) -> str:
        hit = self._directory / "hit"
        return hit.read_text() if hit.exists() else ""


def marks_at(points: Sequence[str]) -> Any:
    """A fixture: daemons that are started with it stop at these points, once they are armed."""

    @pytest.fixture
    def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Marks:
        monkeypatch.setenv("PYTHONPATH", str(STOPS))
        monkeypatch.setenv("CRASH_POINT", "|".join(points))
        monkeypatch.setenv("CRASH_DIRECTORY", str(tmp_path / "marks"))
        return Marks(tmp_path / "marks")

    return marks


marks = marks_at(POINTS)


def test_a_daemon_is_killed_at_every_point(site: Site, marks: Marks, request: pytest.FixtureRequest) -> None:
    """It is started again at once. Each point in turn, as often as there are rounds."""
    rounds = max(int(request.config.getoption("--cluster-rounds")), len(POINTS))
    daemons = {name: site.start(name) for name in NODES}
    ends: Counter[tuple[str, str]] = Counter()
    committed: list[int] = []
    with ranks("run", [daemons[name] for name in NODES], "killed", slots=3) as world:
        for number in range(rounds):
            point, step = POINTS[number % len(POINTS)], 2 * number + 1
            end = _killed(site, world, daemons, marks, point, step)
            ends[point, end] += 1
            assert end in ("committed", "round-aborted"), (point, end)
            stands = step in steps(site.root, "run")
            assert stands == (end == "committed"), (point, step, end)
            for ticket in world.save(step + 1):
                ticket.result()
            committed += [step] * stands + [step + 1]
    lost = sum(count for (_, end), count in ends.items() if end != "committed")
    print(f"\n{rounds} kills at {len(POINTS)} points, {lost} rounds lost: {dict(ends)}", flush=True)
    assert steps(site.root, "run") == committed
    for step in committed:
        verify(PosixTier(site.root), naming.checkpoint_path("run", step))
    restores(daemons, committed)


def _killed(site: Site, world: Ranks, daemons: dict[str, Daemon], marks: Marks, point: str, step: int) -> str:
    """How the save of a step ends in which a daemon is killed at a point, and started again."""
    marks.arm(point)
    tickets = world.save(step, wait=None)
    victim = marks.victim(daemons)
    daemons[victim].kill()
    daemons[victim] = site.start(victim)
    heard = {how_it_ended(ticket) for ticket in tickets}
    assert len(heard) == 1, (point, step, heard)
    return heard.pop()


@pytest.mark.parametrize("point", ["claimed", "after rename", "before the end is told"])
def test_a_committer_is_not_needed(site: Site, marks: Marks, point: str) -> None:
    """It is not started again: another node commits as soon as its claim has ended, and the ranks there hear it."""
    daemons = {name: site.start(name) for name in NODES}
    with ranks("run", [daemons[name] for name in NODES], "killed") as world:
        for ticket in world.save(1):
            ticket.result()
        marks.arm(point)
        tickets = world.save(2, wait=None)
        victim = marks.victim(daemons)
        daemons[victim].kill()
        began = time.monotonic()
        others = [ticket for name, ticket in zip(NODES, tickets, strict=True) if name != victim]
        for ticket in others:
            ticket.result(WITHOUT_IT_S)
        print(f"\nkilled {point}: committed by another node after {time.monotonic() - began:.1f} s", flush=True)
        assert steps(site.root, "run") == [1, 2]
        verify(PosixTier(site.root), naming.checkpoint_path("run", 2))
        daemons[victim] = site.start(victim)
        end = how_it_ended(tickets[NODES.index(victim)])
        assert end in ("committed", "daemon-gone")  # its rank may have heard of it, or gives up after a minute
        for ticket in world.save(3):
            ticket.result()
