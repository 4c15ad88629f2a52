"""Ranks that have saved different steps and now wait, each for the other's part: all are told so, with the steps named."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from holdfast import Checkpointer
from holdfast_formats.errors import CheckpointError
from tests.daemons import RunningDaemon, hide, running
from tests.regressions.joint_worlds import Place, Ranks, ranks
from tests.regressions.test_many_daemons import Site, site, steps

__all__ = ["site"]
pytestmark = [
    pytest.mark.usefixtures("forked_programs"),
    pytest.mark.filterwarnings("ignore::holdfast.SaveWarning"),  # of saves that end as they should here
]
STEPS = "step 4 by rank 0, step 5 by rank 1"
Waiting = Callable[[int, Checkpointer], Any]


class Far(NamedTuple):
    """A daemon by its address."""

    socket: str


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    with running(tmp_path_factory.mktemp("near") / "root") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Far]:
    with running(tmp_path_factory.mktemp("far") / "root", listen="127.0.0.1:0") as daemon:
        hide(daemon)
        yield Far(daemon.url)


def result(rank: int, one: Checkpointer) -> None:
    one.save(4 + rank).result()


def close(rank: int, one: Checkpointer) -> None:
    one.save(4 + rank)
    one.close()


def durable(rank: int, one: Checkpointer) -> None:
    one.save(4 + rank, wait="durable")


def told(world: Ranks, wait: Waiting) -> list[str]:
    """What each rank is told when it waits."""

    def outcome(rank: int, one: Checkpointer) -> str:
        with pytest.raises(CheckpointError) as failed:
            wait(rank, one)
        return f"{failed.value.code}: {failed.value.detail}"

    return world.each(outcome)


def check(said: list[str]) -> None:
    assert all(one.startswith("round-aborted: step") and STEPS in one for one in said), said


@pytest.mark.parametrize("wait", [result, close, durable])
@pytest.mark.parametrize("place", ["near", "far"])
def test_all_ranks_are_told(place: str, wait: Waiting, request: pytest.FixtureRequest) -> None:
    """However they wait, over the socket and over HTTP."""
    daemon: Place = request.getfixturevalue(place)
    with ranks(f"{place}-{wait.__name__}", [daemon, daemon], "first") as world:
        world.save(2)
        said = told(world, wait)
        if wait is close:  # one that closes first ends the other's save, which may leave before it has closed itself
            left = [one for one in said if _LEFT.fullmatch(one)]
            assert len(left) <= 1
            said = [one for one in said if one not in left]
        check(said)
        if wait is not close:
            world.save(7)  # and go on together


_LEFT = re.compile(
    r"round-aborted: rank (1 disconnected before step 4 was complete; the last step that it began to save was 5"
    r"|0 disconnected before step 5 was complete; the last step that it began to save was 4)"
)
_LAST = re.compile("step 4 by rank 0|step 5 by rank 1")  # either has come back first


def test_ranks_that_wait_while_their_daemon_is_replaced_are_told(tmp_path_factory: pytest.TempPathFactory) -> None:
    """They have said to the first one that they wait; the next one knows nothing of that."""
    root = tmp_path_factory.mktemp("replaced") / "root"
    first = RunningDaemon(root)
    with ranks("run", [first, first], "first") as world:
        world.save(2)
        world.set(5)
        staged = [one.save(4 + rank) for rank, one in enumerate(world.checkpointers)]
        assert all(ticket.wait_staged(60) for ticket in staged[:1])
        first.kill()
        with running(root):
            said = told(world, lambda rank, one: one.close())
    # The rank that is told first may have left before the other one has come back.
    assert all(one.startswith("round-aborted: ") for one in said) and any(_LAST.search(one) for one in said), said


@pytest.mark.parametrize("wait", [result, pytest.param(close, marks=pytest.mark.cluster)])
def test_ranks_of_two_nodes_are_told(site: Site, wait: Waiting) -> None:
    """Neither daemon knows of the other's ranks what they wait for. Afterwards they save on, the same steps too."""
    a, b = site.start("a"), site.start("b")
    with ranks("run", [a, a, b], "first") as world:
        world.save(2)
        said = told(world, lambda rank, one: wait(rank // 2, one))
        assert all("step 4 by ranks 0, 1, step 5 by rank 2" in one for one in said), said
        if wait is not close:
            world.save(7)
    assert steps(site.root, "run") == [2, 7][: 1 + (wait is not close)]


@pytest.mark.cluster
def test_ranks_of_two_nodes_that_wait_for_the_same_save_are_left_alone(site: Site) -> None:
    """One node is late with its part: longer than it takes to find saves that are stuck."""
    a, b = site.start("a"), site.start("b")
    with ranks("run", [a, b], "first") as world:
        world.save(2)
        world.set(3)

        def late(rank: int, one: Checkpointer) -> None:
            time.sleep(4 * rank)
            one.save(3).result()

        world.each(late)
    assert steps(site.root, "run") == [2, 3]
