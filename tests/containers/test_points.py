"""A daemon, its container, its unit or its trainer is killed or stopped at eight points of a save (make engine).

What was staged is committed afterwards, by this daemon or the next one, and restores as it was. It is lost only where
the table in docs/operating.md says so; an event of the next daemon then names it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from holdfast.read.directory_root import committed_steps
from holdfast.read.root_directory import open_checkpoint
from tests.containers.places import STOPS, BelowSystemd, InContainer, Place, Rank, below_systemd, in_container
from tests.containers.projects import HEALTHY_S
from tests.crash.rank_process import content
from tests.daemons import wait_until
from tests.engine import Engine

# Where the daemon waits; at the other points the trainer does, or both are idle.
WAITS = {
    "staged": "before the write",
    "writing": "mid write",
    "committing": "before COMMIT",
    "reading back": "before it is read back",
    "upgrading": "mid write",
}
POINTS = ("idle", "staging", *WAITS, "restoring")
DAEMON, CONTAINER, STOPPED, TRAINER = "daemon killed", "container killed", "container stopped", "trainer killed"
FROZEN, BOTH = "daemon frozen, container stopped", "trainer and container killed"
UNIT, UNIT_STOPPED = "trainer and unit killed", "trainer killed, unit stopped"
TRAINER_LIVES = (DAEMON, CONTAINER, STOPPED, FROZEN)
# A save that not every rank has staged, and whose trainer or daemon goes in order, is none.
NEVER_STAGED = {("staging", how) for how in (TRAINER, BOTH, UNIT, UNIT_STOPPED)}
LOST = {(point, BOTH) for point in ("staged", "writing", "committing", "upgrading")}
DROP_IN = f"""
[Service]
Environment="PYTHONPATH={STOPS}" "CRASH_POINT={"|".join(dict.fromkeys(WAITS.values()))}"
Environment=CRASH_DIRECTORY=/var/lib/holdfast/marks
"""
pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def container(made: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InContainer]:
    with in_container(made, tmp_path_factory.mktemp("points"), "|".join(dict.fromkeys(WAITS.values()))) as place:
        yield place


@pytest.fixture(scope="module")
def unit(made: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BelowSystemd]:
    with below_systemd(made, tmp_path_factory.mktemp("points"), DROP_IN) as place:
        yield place


@pytest.fixture(scope="module")
def lost() -> list[str]:
    """The runs whose first save was staged, and is lost."""
    return []


def started(place: Place, point: str, run: str) -> Rank:
    """A rank on its way to a point."""
    if point == "restoring":
        with Rank(place, run, "launch-0", "1") as first:
            first.wait_for("committed 1")
            first.end()
        return Rank(place, run, "launch-1", "2!", "before a restore reads")
    if point in WAITS:
        place.arm(WAITS[point])
    return Rank(place, run, "launch-1", "1!leased,2!" if point == "staging" else "1,2!")


def come_to(place: Place, point: str, rank: Rank) -> None:
    """Wait until the rank, and the daemon where it waits, have come there."""
    if point == "staging":
        rank.wait_for("leased 1")
    elif point == "idle":
        rank.wait_for("committed 1")
        place.settle()
    else:
        if point in WAITS:
            rank.wait_for("sealed 1")
        place.wait_for_a_victim()


def kill_or_stop(place: Place, rank: Rank, how: str, waits: bool) -> None:
    """Returns when it is dead or has stopped. `waits`: the daemon waits at a point, and goes on once it was told to stop."""
    if how not in TRAINER_LIVES:
        rank.kill()
    if how in (DAEMON, FROZEN):
        assert isinstance(place, InContainer)
        place.signal_daemon(signal.SIGKILL if how == DAEMON else signal.SIGSTOP)
    elif how in (CONTAINER, BOTH, UNIT):
        place.kill()
    if how in (STOPPED, FROZEN, UNIT_STOPPED):
        if waits:
            place.while_it_stops(place.stop)
        else:
            place.stop()


def check(place: Place, run: str, steps: set[int]) -> None:
    """These steps are committed, and their bytes are those that were saved."""
    wait_until(lambda: set(committed_steps(place.root, run)) == steps, HEALTHY_S)
    for step in steps:
        with open_checkpoint(place.root, None, run, step) as reader:
            assert reader.verify() == []
            found = reader.read("model", "w")
            assert np.array_equal(found, content(step, 0, found.size))


def go_on(place: Place, rank: Rank, point: str, how: str, run: str) -> None:
    """The trainer lives: its save ends as its daemon says, and so does the next one."""
    if point == "staging":
        rank.go()
    fails = ("aborted round-aborted 1", "refused round-aborted 1")
    ended = rank.wait_for("restored 1" if point == "restoring" else "committed 1", *fails)
    assert ended not in fails or (point == "staging" and how in (STOPPED, FROZEN)), rank.said
    rank.go()
    rank.wait_for("committed 2")
    rank.end()
    # A rank that was told that its save fails may have sealed it all the same, and the next daemon found it.
    check(place, run, {2} | set(committed_steps(place.root, run)) & {1} if ended in fails else {1, 2})


def begin_again(place: Place, run: str, steps: set[int]) -> None:
    """The trainer is gone: the next one gets what was staged, and saves."""
    with Rank(place, run, "launch-2", "3") as rank:
        assert rank.wait_for("restored 0", "restored 1", "wrong 1") == ("restored 1" if steps else "restored 0")
        rank.wait_for("committed 3")
        rank.end()
    check(place, run, {*steps, 3})


def try_cell(place: Place, point: str, how: str, lost: list[str]) -> None:
    run = f"{point} {how}".replace(" ", "-").replace(",", "")
    with started(place, point, run) as rank:
        come_to(place, point, rank)
        act = partial(kill_or_stop, place, rank, how, point in WAITS)
        if point == "upgrading":
            place.while_it_stops(place.upgrade, act)
        else:
            act()
        place.start()
        wait_until(place.is_up, HEALTHY_S)
        place.let_go()  # a rank that restores: it has to reach the next daemon within 10 s
        if how in TRAINER_LIVES:
            go_on(place, rank, point, how, run)
        else:
            begin_again(place, run, set() if (point, how) in LOST | NEVER_STAGED else {1})
    if (point, how) in LOST:
        lost.append(run)


@pytest.mark.parametrize("how", [DAEMON, CONTAINER, STOPPED, FROZEN, TRAINER, BOTH])
@pytest.mark.parametrize("point", POINTS)
def test_in_a_container(container: InContainer, point: str, how: str, lost: list[str]) -> None:
    try_cell(container, point, how, lost)


@pytest.mark.parametrize("how", [UNIT, UNIT_STOPPED])
@pytest.mark.parametrize("point", POINTS)
def test_below_systemd(unit: BelowSystemd, point: str, how: str) -> None:
    try_cell(unit, point, how, [])


def test_each_loss_is_told(container: InContainer, lost: list[str]) -> None:
    """One event for each lost save, which names its step, and none for any other save."""
    if not lost:
        pytest.skip("none of the tests above ran that loses a save")
    wait_until(lambda: len(container.ask("/v1/events?kind=staged-save-lost")) >= len(lost), HEALTHY_S)
    events = container.ask("/v1/events?kind=staged-save-lost")
    assert sorted((event["run"], event["step"], event["level"]) for event in events) == [
        (run, 1, "error") for run in sorted(lost)
    ]
