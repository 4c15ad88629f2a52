"""Ranks at the daemons of several nodes save one checkpoint, and restore it in any other arrangement."""

from __future__ import annotations

import json
import time

import psycopg
import pytest
import torch

from holdfast.rest.api import Api
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError, ReplicasDiffer
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.storage.posix import PosixTier
from tests.daemons import wait_until
from tests.regressions.joint_worlds import COLUMNS, ROWS, ranks, whole
from tests.regressions.test_many_daemons import Site, site, steps

__all__ = ["site"]
pytestmark = [
    pytest.mark.usefixtures("forked_programs"),
    pytest.mark.filterwarnings("ignore::holdfast.SaveWarning"),  # of saves that a test lets fail
]


def test_ranks_of_two_nodes_save_one_checkpoint(site: Site) -> None:
    """Two ranks at each of two daemons: every step is one verified checkpoint, and restores bit for bit."""
    a, b = site.start("a"), site.start("b")
    with ranks("run", [a, a, b, b], "first") as world:
        for step in (1, 2, 3):
            for ticket in world.save(step):
                ticket.result()
    assert steps(site.root, "run") == [1, 2, 3]
    for step in (1, 2, 3):
        verify(PosixTier(site.root), naming.checkpoint_path("run", step))
    assert not list((site.root / "run" / naming.STAGING).iterdir())
    with ranks("run", [b, a], "second") as other:
        assert other.each(lambda rank, one: one.restore()) == [3, 3]
        other.check(3)
    with ranks("run", [a], "third") as alone:
        assert alone.each(lambda rank, one: one.restore(step=2)) == [2]
        alone.check(2)
        assert torch.equal(alone.states[0]["model"]["columns"].tensor, whole(2)["columns"])
    with Api(b.url) as api:
        wait_until(lambda: [found.state for found in api.rounds("run")] == ["committed"] * 3)
        wait_until(lambda: api.checkpoint("run", 3).world == 4)


def test_training_goes_on_while_the_catalog_is_away(site: Site) -> None:
    """No save() waits for it. The oldest that was sealed, and the newest, are committed once it is back; those between
    gave way, on all nodes alike.
    """
    a, b = site.start("a"), site.start("b")
    with ranks("run", [a, b], "first", slots=2) as world:
        for ticket in world.save(1):
            ticket.result()
        site.postgres.stop()
        tickets = {}
        for step in range(2, 7):
            tickets[step] = world.save(step, wait="staged")
        assert not any(ticket.done for ticket in tickets[2] + tickets[6])
        site.postgres.start()
        for ticket in tickets[2] + tickets[6]:
            ticket.result(180)
        assert {_end(ticket) for step in (3, 4, 5) for ticket in tickets[step]} == {"generation-dropped"}
        whys = {str(ticket.error) for step in (3, 4, 5) for ticket in tickets[step]}
        assert all("step 2 is waiting for" in why and "storage" not in why for why in whys), whys
        for ticket in world.save(7):
            ticket.result()
    assert steps(site.root, "run") == [1, 2, 6, 7]


def test_the_newest_save_is_not_dropped_for_one_that_waits_to_be_written(site: Site) -> None:
    """As on one node: while a save is written, all nodes drop the one that waits for the newest one, sealed or not."""
    slow = ("--write-bytes-per-second", "500000")
    a, b = site.start("a", *slow), site.start("b", *slow)
    with ranks("run", [a, b], "first", slots=2) as world:
        tickets = {}
        for step in (1, 2):
            tickets[step] = world.save(step, wait="staged")
            wait_until(lambda step=step: len(_rounds(site)) == step and set(_rounds(site)) <= {"sealed", "committed"})
        tickets[3] = world.save(3, wait="staged")
        ends = {step: {_end(ticket) for ticket in tickets[step]} for step in tickets}
    assert ends[1] == ends[3] == {"committed"} and ends[2] <= {"committed", "generation-dropped"} and len(ends[2]) == 1
    assert steps(site.root, "run") == [step for step in ends if ends[step] == {"committed"}]


def test_a_catalog_that_goes_away_while_shares_are_written(site: Site) -> None:
    """Sealed by all, being written by both: it is committed once the catalog is back."""
    slow = ("--write-bytes-per-second", "1000000")
    a, b = site.start("a", *slow), site.start("b", *slow)
    with ranks("run", [a, b], "first") as world:
        tickets = world.save(1, wait=None)
        wait_until(lambda: any(state == "sealed" for state in _rounds(site)))
        site.postgres.stop()
        time.sleep(4)
        site.postgres.start()
        assert {_end(ticket) for ticket in tickets} == {"committed"}
    assert steps(site.root, "run") == [1]


def test_a_catalog_that_has_lost_a_round_ends_that_one_alone(site: Site) -> None:
    """It was restored from a backup: all ranks of that save are told so, and other saves of these nodes commit."""
    slow = ("--write-bytes-per-second", "1000000")
    a, b = site.start("a", *slow), site.start("b", *slow)
    with ranks("run", [a, b], "first") as world, ranks("other", [b, a], "second") as other:
        tickets = world.save(1, wait=None)
        wait_until(lambda: any(state == "sealed" for state in _rounds(site)))
        with psycopg.connect(site.url.replace("postgresql+psycopg", "postgresql")) as connection:
            connection.execute("DELETE FROM parts")
            connection.execute("DELETE FROM joint_rounds")
        assert {_end(ticket) for ticket in other.save(5)} == {"committed"}
        assert {_end(ticket) for ticket in tickets} == {"round-aborted"}
        assert {_end(ticket) for ticket in world.save(2)} == {"committed"}
    assert steps(site.root, "run") == [2] and steps(site.root, "other") == [5]


def test_a_rank_that_gives_up_ends_the_save_on_all_nodes(site: Site) -> None:
    """Ranks that do not hold the same tensor: all of them are told so, by its name; the next save commits."""
    a, b = site.start("a"), site.start("b")
    with ranks("run", [a, b], "first") as world:
        world.set(1)
        world.states[1]["model"]["alike"][3] = -1.0
        tickets = world.each(lambda rank, one: one.save(1))
        for ticket in tickets:
            with pytest.raises(ReplicasDiffer, match="model/alike"):
                ticket.result(180)
        for ticket in world.save(2):
            ticket.result()
    assert steps(site.root, "run") == [2]


@pytest.mark.cluster  # takes a minute
def test_ranks_that_end_before_their_part(site: Site) -> None:
    """Rank 0 has sealed; rank 1, at the other node, closes without it. Rank 0 is told after a minute, not after ten."""
    a, b = site.start("a"), site.start("b")
    with ranks("run", [a, b], "first") as world:
        for ticket in world.save(1):
            ticket.result()
        ticket = world.checkpointers[0].save(2)
        ticket.wait_staged()
        world.checkpointers[1].close()
        assert _end(ticket, 300) == "round-aborted"
    assert steps(site.root, "run") == [1]


def test_damage_that_one_node_meets_is_met_by_all(site: Site) -> None:
    """A byte of rank 1's rows is flipped: the ranks of both nodes go on from the step before."""
    a, b = site.start("a"), site.start("b")
    with ranks("run", [a, a, b, b], "first") as world:
        for step in (1, 2):
            for ticket in world.save(step):
                ticket.result()
    file = site.root / naming.checkpoint_path("run", 2) / "model.safetensors"
    header = int.from_bytes(file.read_bytes()[:8], "little")
    start = json.loads(file.read_bytes()[8 : 8 + header])["rows"]["data_offsets"][0]
    with file.open("r+b") as opened:
        opened.seek(8 + header + start + ROWS * COLUMNS * 4 - 5)
        opened.write(b"\xa5")
    with ranks("run", [a, b], "second") as world:
        assert world.each(lambda rank, one: one.restore()) == [1, 1]
        world.check(1)


def test_a_launch_of_one_node_meets_nobody(site: Site) -> None:
    """Its saves leave nothing in the tables of joint rounds that others would wait for."""
    a = site.start("a")
    site.start("b")
    with ranks("run", [a, a], "first") as world:
        for step in (1, 2):
            for ticket in world.save(step):
                ticket.result()
    assert set(_rounds(site)) <= {"aborted"} and steps(site.root, "run") == [1, 2]


def _rounds(site: Site) -> list[str]:
    """The states of all joint rounds."""
    with psycopg.connect(site.url.replace("postgresql+psycopg", "postgresql")) as connection:
        return [state for (state,) in connection.execute("SELECT state FROM joint_rounds")]


def _end(ticket: object, wait_s: float = 60.0) -> str:
    try:
        ticket.result(wait_s)  # type: ignore[attr-defined]
    except CheckpointError as error:
        return error.code
    return "committed"
