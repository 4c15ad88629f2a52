"""Whether a checkpoint is in a tier or replica: for tickets over both transports, and for `holdfast wait`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast import Checkpointer
from holdfast.rest.api import Api
from holdfast.tickets import SaveTicket
from holdfast_formats.errors import (
    CorruptExtent,
    Damaged,
    DeadlineExceeded,
    GenerationDropped,
    InvalidRequest,
    NoSuchCheckpoint,
    NoSuchResource,
)
from holdfast_formats.naming import CheckpointId
from holdfast_service.control.database.schema import CheckpointRow
from tests.daemon.copies_world import RUN, copies_world
from tests.daemons import running
from tests.kit import commands

SIZE = 100_000


@pytest.mark.parametrize("over", ["socket", "HTTP"])
def test_a_ticket_waits_for_a_tier(over: str, tmp_path: Path) -> None:
    """For a tier that is a directory, and for a replica: once `result` returns, the copy is listed as read back. A tier that
    there is not is refused at once, with the names of those that there are; so it is by `holdfast wait`.
    """
    places = ("--tier", f"near={tmp_path / 'near'}", "--replica", f"far={tmp_path / 'far'}")
    with running(tmp_path / "root", *places, listen="127.0.0.1:0") as daemon, Api(daemon.url) as api:
        at = str(daemon.socket) if over == "socket" else daemon.url
        with Checkpointer("r", {"x": torch.arange(SIZE)}, at=at) as checkpointer:
            ticket = checkpointer.save(1)
            with pytest.raises(NoSuchResource, match="no tier or replica 'cloud': it has far, near"):
                ticket.result(180, tier="cloud")
            for tier in ("near", "far"):
                assert ticket.result(180, tier=tier).step == 1
                copies = api.request("GET", "/v1/runs/r/checkpoints/1/replicas").json()["items"]
                assert [one["state"] for one in copies if one["tier"] == tier] == ["present"]
        wrong = commands.call("wait", "r@2", "--tier", "cloud", "--url", daemon.url)
        assert wrong.exit_code and "no tier or replica 'cloud': it has far, near" in wrong.stderr


def test_a_ticket_waits_no_longer_than_told(tmp_path: Path) -> None:
    """A replica whose disk is gone has no copy in time; the error says what is missing. The save stands."""
    (tmp_path / "file").touch()
    with (
        running(tmp_path / "root", "--replica", f"near={tmp_path / 'file' / 'near'}") as daemon,
        Checkpointer("r", {"x": torch.arange(SIZE)}, at=str(daemon.socket)) as checkpointer,
    ):
        ticket = checkpointer.save(1)
        with pytest.raises(DeadlineExceeded, match=r"r@1 (has yet to be copied to near|is not verified yet)"):
            ticket.result(1.0, tier="near")
        assert ticket.result(180).step == 1


def test_a_ticket_of_a_save_that_ended_without_a_checkpoint() -> None:
    """Its error, also where a tier is asked for."""
    ticket = SaveTicket("r", 1, 1)
    ticket.end(GenerationDropped.of(1, 2, "newest-wins"))
    with pytest.raises(GenerationDropped):
        ticket.result(180, tier="near")


def test_what_is_answered(tmp_path: Path) -> None:
    """Not verified yet, not copied yet with the last problem, copied; removed from the root by its retention afterwards, by
    name, or before it was copied; damaged.
    """
    with copies_world(tmp_path, steps=(5, 6)) as world:
        control, asked = world.control, world.control.awaited_copies
        with pytest.raises(NoSuchResource, match="it has none"):
            asked.of(RUN, 5, "far")
        control.tiers.add_replica("far")
        assert asked.of(RUN, 5, "far").why == f"{RUN}@5 has yet to be copied to far"
        control.replicas.copying("far", control.catalog.checkpoint(RUN, 5))
        control.replicas.failed("far", CheckpointId(RUN, 5), InvalidRequest("the disk is full"), damaged=False)
        assert asked.of(RUN, 5, "far").why == f"{RUN}@5 has yet to be copied to far: the disk is full"
        world.copy()
        assert asked.of(RUN, 5, "far").copied and asked.of(RUN, 6, "far").copied
        with control.catalog.database.write() as session:
            session.get_one(CheckpointRow, (RUN, 6)).bytes += 1  # thinned, say: the copy is of what was there before
            session.get_one(CheckpointRow, (RUN, 6)).verified = False
        assert asked.of(RUN, 6, "far").why == f"{RUN}@6 is not verified yet"
        with control.catalog.database.write() as session:
            session.get_one(CheckpointRow, (RUN, 6)).damage = CorruptExtent("flipped").problem()
        with pytest.raises(Damaged, match="flipped"):
            asked.of(RUN, 6, "far")
        with control.catalog.database.write() as session:
            session.delete(session.get_one(CheckpointRow, (RUN, 5)))
        assert asked.of(RUN, 5, "far").copied
        with pytest.raises(NoSuchCheckpoint, match="and far has no copy of it"):
            asked.of(RUN, 7, "far")
