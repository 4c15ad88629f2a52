"""A checkpoint is saved again in its own place while daemons die and the catalog is away: what a ticket said stands."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import Api, Checkpointer
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError, InUse
from holdfast_formats.lineage import Intent
from holdfast_service.control.checkpoints.readers import READERS_WAIT_S
from holdfast_service.storage import MemoryTier
from tests.crash.points import Place, place, stop_at  # noqa: F401  a fixture is found by its name
from tests.daemon.saver_world import saver_world
from tests.daemons import RunningDaemon, running, wait_until

RUN = "r"


def fill(state: dict[str, torch.Tensor], value: float) -> None:
    state["x"].fill_(value)


@pytest.mark.parametrize("point", ["before exchange", "after exchange"])
def test_killed_while_a_step_takes_its_own_place(
    point: str,
    place: Place,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The daemon dies at the exchange of a step that this very launch has saved before: the new one comes to stand."""
    stop_at(point, place, monkeypatch)
    daemon = RunningDaemon(place.root)
    state = {"x": torch.ones(1000)}
    with Checkpointer(RUN, state, at=daemon.socket) as checkpointer:
        checkpointer.save(1, wait="durable")
        (place.marks / "armed").touch()
        fill(state, 2.0)
        ticket = checkpointer.save(1, existing="replace")
        wait_until(lambda: place.stopped is not None or ticket.done)
        assert place.stopped is not None, ticket.result(0)
        daemon.kill()
        (place.marks / "go").touch()
        daemon = RunningDaemon(place.root)
        ticket.result(180)
        fill(state, 0.0)
        assert checkpointer.restore() == 1 and float(state["x"][0]) == 2.0
        fill(state, 3.0)
        checkpointer.save(2, wait="durable")
    assert daemon.stop() == 0
    assert not any((place.root / RUN / naming.STAGING).iterdir())


def test_a_catalog_that_lags_behind_removes_nothing_by_what_it_knows_of_the_old_one(tmp_path: Path) -> None:
    """While somebody else holds the catalog a step is replaced: it is not removed as the one it was, and is listed later."""
    root = tmp_path / "root"
    with running(root, listen="127.0.0.1:0") as daemon, Api(daemon.url) as api:
        state = {"x": torch.ones(10)}
        with Checkpointer(RUN, state, at=daemon.socket) as checkpointer:
            for step in (10, 20, 30):
                fill(state, float(step))
                checkpointer.save(step, wait="durable")
            wait_until(lambda: all(c.verified for c in api.checkpoints(RUN)))
            other = sqlite3.connect(root / naming.CATALOG, timeout=180, isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            try:
                fill(state, 21.0)
                checkpointer.save(20, wait="durable", existing="replace")
                with pytest.raises(CheckpointError) as refused:
                    api.remove(RUN, 20)
                assert refused.type is InUse or refused.value.code == "catalog-unavailable", refused
            finally:
                other.execute("ROLLBACK")
                other.close()
            wait_until(lambda: api.checkpoint(RUN, 20).created > api.checkpoint(RUN, 30).created)
            wait_until(lambda: api.checkpoint(RUN, 20).verified)
            fill(state, 0.0)
            assert checkpointer.restore(step=20) == 20 and float(state["x"][0]) == 21.0
        api.remove(RUN, 20)
        assert {c.step for c in api.checkpoints(RUN)} == {10, 30}


def test_what_is_to_be_replaced_may_go_in_that_very_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention removes the step between the look and the exchange: the new one is committed in the empty place."""
    with saver_world() as world:
        (rank,) = world.launch(1)
        rank.save(1)
        rank.wait(1)
        replacing = world.control.rotation.replacing

        @contextmanager
        def removed_first(run: str, step: int) -> Iterator[None]:
            world.tier.remove_tree(naming.checkpoint_path(run, step))
            with replacing(run, step):
                yield

        monkeypatch.setattr(world.control.rotation, "replacing", removed_first)
        del rank.outcomes[1]
        rank.save(1, intent=Intent(turn=1, existing="replace", again=1))
        assert rank.wait(1).state == "committed"
        assert world.control.lineage_index.launch(RUN, 1) == (rank.attempt, 1)


def test_a_save_in_the_place_of_what_was_left_behind_asks_no_sql(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch went back and saves steps of the line it left: each save waited for a locked catalog, up to four seconds."""
    with saver_world() as world:
        for made in (1, 2, 3):
            (rank,) = world.launch(1)
            rank.save(made, intent=Intent(restored=made - 1 or None))
            assert rank.wait(made).state == "committed"
        world.checked()

        def asked(question: object, wait_s: float) -> None:
            raise AssertionError("a save waits for SQL")

        monkeypatch.setattr(world.control.record_queue, "query", asked)
        (rank,) = world.launch(1)
        for again in (2, 3):
            rank.save(again, intent=Intent(restored=1, turn=1))
            assert rank.wait(again).state == "committed", rank.wait(again)


class SlowlyRead(MemoryTier):
    """A disk from which a checkpoint is read more slowly than a reader is waited for: `slow` is its path."""

    slow = "none"
    reading = False

    def read_stored(self, path: str, offset: int, buffer: Any) -> int:
        if path.startswith(self.slow):
            self.reading = True
            time.sleep(READERS_WAIT_S + 1)
        return super().read_stored(path, offset, buffer)


@pytest.mark.parametrize("read", [1, 2], ids=["itself", "the one after it"])
def test_the_daemons_own_check_keeps_no_save_from_its_place(read: int) -> None:
    """A check goes on for as long as a checkpoint is large: a save in the place of one that was being read was refused."""
    with saver_world(tier := SlowlyRead()) as world:
        (rank,) = world.launch(1)
        tier.slow = naming.checkpoint_path(RUN, read)
        for made in range(1, read + 1):
            rank.save(made)
            assert rank.wait(made).state == "committed"
        wait_until(lambda: tier.reading)
        tier.slow = "none"
        del rank.outcomes[1]
        rank.save(1, intent=Intent(turn=1, existing="replace", again=1))
        assert rank.wait(1).state == "committed", rank.wait(1)
        world.checked()
        assert {world.catalog.checkpoint(RUN, step).state for step in (1, read)} == {"verified"}
