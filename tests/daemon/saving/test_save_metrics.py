"""What a save cost: every phase that happened is kept beside its round, in at most one more transaction than before."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast_formats.errors import RoundAborted, StorageFailed
from holdfast_formats.naming import Place
from holdfast_formats.rest import bodies
from holdfast_formats.rest.measurements import SaveTimes
from holdfast_service.daemon.saving import save_metrics
from holdfast_service.daemon.writing import disk_throughput
from holdfast_service.daemon.writing.disk_throughput import DiskThroughput
from holdfast_service.daemon.writing.fsync_timer import FsyncTimed
from holdfast_service.storage import MemoryTier, PosixStore, PosixTier, disk_speed
from tests.daemon.saver_world import GatedTier, Rank, SaverWorld, saver_world

PATIENCE_S = 180.0
PHASES = {"stage_s", "queue_s", "write_s", "fsync_s", "raised_s", "commit_s", "bytes"}


def the_round(world: SaverWorld, step: int) -> bodies.Round:
    return next(made for made in world.catalog.rounds.page("r").items if made.step == step)


def awaited(world: SaverWorld, step: int, done: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """What is kept of a save, once it is as wanted; late facts are written by the reaper's tick."""
    until = time.monotonic() + PATIENCE_S
    while not done(found := the_round(world, step).measured or {}):
        assert time.monotonic() < until, found
        world.saver.expire()
        time.sleep(0.01)
    return found


def test_the_phases_of_a_save_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the schema names, none below nothing, parts within their whole; and the node that wrote it."""
    with saver_world() as world:
        for rank in world.launch(2):
            rank.save(1)
            world.saver.history.stalled(rank.who, 1, 0.25 + rank.rank)
        found = awaited(world, 1, lambda kept: "verify_s" in kept)
        assert set(found) == PHASES | {"verify_s", "stall_s"} and set(found) <= set(SaveTimes.model_fields)
        assert all(seconds >= 0 for seconds in found.values())
        assert found["fsync_s"] <= found["write_s"]
        assert found["stall_s"] == 1.25
        assert found["bytes"] == world.catalog.checkpoint("r", 1).bytes
        assert the_round(world, 1).node == "node"


def two_saves(world: SaverWorld, tier: GatedTier) -> Rank:
    """A rank that has saved twice: the first is being written, the second waits for it."""
    (rank,) = world.launch(1)
    tier.gate.swing(True)
    rank.save(1)
    tier.gate.wait_for(1)
    rank.save(2)
    return rank


def test_a_save_that_waits_for_another_has_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one behind has queued at least as long as the writing of the one before still took."""
    tier = GatedTier(MemoryTier())
    with saver_world(tier) as world:
        rank = two_saves(world, tier)
        time.sleep(0.05)
        tier.gate.swing(False)
        rank.wait(2)
        first, second = (the_round(world, step).measured or {} for step in (1, 2))
    assert second["queue_s"] >= 0.05 and first["write_s"] >= 0.05
    assert second["queue_s"] > first["queue_s"]


def test_what_was_dropped_or_aborted_keeps_what_happened() -> None:
    """No phase that did not happen; why is beside it."""
    tier = GatedTier(MemoryTier())
    with saver_world(tier) as world:
        rank = two_saves(world, tier)
        rank.save(3, "newest-wins")
        tier.gate.swing(False)
        rank.wait(3)
        rank.lease(4)
        world.saver.give_up(rank.who, 4, RoundAborted("no more"))
        dropped, aborted = the_round(world, 2), the_round(world, 4)
    assert (dropped.state, dropped.code, set(dropped.measured or {})) == ("dropped", "generation-dropped", {"stage_s"})
    assert "newest-wins" in (dropped.detail or "")
    assert (aborted.state, aborted.measured, aborted.node) == ("aborted", None, "node")


def test_a_save_costs_one_more_transaction_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after the end is gathered: check and stalls of all ranks go in together."""
    told: list[dict[str, float]] = []
    with saver_world() as world:
        monkeypatch.setattr(world.control.rounds, "measure", lambda number, later: told.append(dict(later)))
        first, second = world.launch(2)
        first.save(1)
        second.save(1)
        first.wait(1)
        world.saver.history.stalled(first.who, 1, 0.5)
        while world.saver.checks.pending:
            time.sleep(0.005)
        world.saver.expire()
        assert told == []
        world.saver.history.stalled(second.who, 1, 0.125)
        world.saver.expire()
        world.saver.expire()
    assert [set(later) for later in told] == [{"verify_s", "stall_s"}]
    assert told[0]["stall_s"] == 0.5


def test_who_never_says_is_not_awaited_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of an older version tells nothing; closing keeps what there is at once."""
    monkeypatch.setattr(save_metrics, "PATIENCE_S", 0.05)
    with saver_world() as world:
        (rank,) = world.launch(1)
        rank.save(1)
        assert "stall_s" not in awaited(world, 1, lambda kept: "verify_s" in kept)
        monkeypatch.setattr(save_metrics, "PATIENCE_S", 3600.0)
        rank.save(2)
        rank.wait(2)
        world.saver.close()
        assert "verify_s" in (the_round(world, 2).measured or {})


def test_a_failing_catalog_fails_no_save(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be kept is logged."""

    def fail(*_: Any) -> None:
        raise StorageFailed("the catalog is away")

    with saver_world() as world:
        monkeypatch.setattr(world.control.rounds, "measure", fail)
        rank = world.saved(1)
        world.saver.history.stalled(rank.who, 1, 0.5)
        until = time.monotonic() + PATIENCE_S
        while "cannot record all timings" not in caplog.text and time.monotonic() < until:
            world.saver.expire()
            time.sleep(0.01)
    assert "the catalog is away" in caplog.text


def test_a_step_that_is_tried_again_begins_anew() -> None:
    """What its first try cost is not counted for the second."""
    with saver_world() as world:
        (rank,) = world.launch(1)
        rank.lease(1)
        world.saver.history.stalled(rank.who, 1, 9.0)
        world.saver.give_up(rank.who, 1, RoundAborted("once"))
        rank.save(1)
        world.saver.history.stalled(rank.who, 1, 0.5)
        assert awaited(world, 1, lambda kept: "verify_s" in kept)["stall_s"] == 0.5


@pytest.mark.parametrize("before", [None, 0.25])
def test_a_rank_that_speaks_while_the_round_ends_is_heard(monkeypatch: pytest.MonkeyPatch, before: float | None) -> None:
    """The transaction that ends the round has begun without it; it goes into the next."""
    with saver_world() as world:
        (rank,) = world.launch(1)
        commit = world.control.saves.commit

        def spoken_over(*arguments: Any) -> Any:
            world.saver.history.stalled(rank.who, 1, 0.5)
            return commit(*arguments)

        monkeypatch.setattr(world.control.saves, "commit", spoken_over)
        if before is not None:
            world.saver.history.stalled(rank.who, 1, before)
        rank.save(1)
        assert awaited(world, 1, lambda kept: "verify_s" in kept)["stall_s"] == 0.5


def test_only_the_newest_saves_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks say of saves that never were cannot fill the memory."""
    monkeypatch.setattr(save_metrics, "KEPT_MAX", 3)
    with saver_world() as world:
        (rank,) = world.launch(1)
        for step in range(10):
            world.saver.history.stalled(rank.who, step, 1.0)
        assert len(world.saver.history._saves) == 3


def test_fsyncs_are_timed_and_nothing_else_changes(tmp_path: Path) -> None:
    """The store behind does everything; a failing fsync is timed and raised."""
    tier = PosixTier(tmp_path)
    timed = FsyncTimed(PosixStore(tier).begin(Place("run", 1, 1)))
    file = timed.create("b", 8)
    assert file.alignment >= 1
    file.write(0, [b"12345678"])
    assert timed.seconds == 0
    file.finish()
    assert timed.seconds > 0 and tier.read(f"{timed.place.path}/b") == b"12345678"
    before = timed.seconds
    with pytest.raises(StorageFailed):
        file.finish()
    assert timed.seconds > before
    file.discard()


def test_the_disks_throughput_is_measured_when_it_costs_little() -> None:
    """After a save as large, once a day, while none is written; saves that are faster raise it."""
    disk, asked = DiskThroughput(), []

    def probe(stop: Callable[[], bool]) -> float | None:
        asked.append(stop())
        return None if asked[-1] else 5e8

    disk.probe = probe
    disk.checked(disk_throughput.PROBE_BYTES - 1)
    assert disk._thread is None
    disk.writing(True)
    disk.checked(disk_throughput.PROBE_BYTES)
    assert disk._thread is not None
    disk._thread.join()
    disk.writing(False)
    assert (asked, disk.bytes_per_second) == ([True], None)
    for _ in range(2):
        disk.checked(disk_throughput.PROBE_BYTES)
        disk._thread.join()
    assert (asked, disk.bytes_per_second) == ([True, False], 5e8)
    disk.wrote(disk_throughput.PROBE_BYTES - 1, 1e-9)
    disk.wrote(disk_throughput.PROBE_BYTES, 10.0)
    assert disk.bytes_per_second == 5e8
    disk.wrote(disk_throughput.PROBE_BYTES, disk_throughput.PROBE_BYTES / 1e9)
    assert disk.bytes_per_second == pytest.approx(1e9)
    disk.close()


def test_a_probe_that_fails_or_is_broken_off(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is known then; closing breaks one off and waits for it."""
    caplog.set_level("INFO")
    disk, begun = DiskThroughput(), threading.Event()

    def fail(stop: Callable[[], bool]) -> float | None:
        raise StorageFailed("no such disk")

    def last(stop: Callable[[], bool]) -> float | None:
        begun.set()
        while not stop():
            time.sleep(0.001)
        return None

    disk.probe = fail
    disk.checked(disk_throughput.PROBE_BYTES)
    assert disk._thread is not None
    disk._thread.join()
    disk.probe = last
    disk.checked(disk_throughput.PROBE_BYTES)
    assert begun.wait(PATIENCE_S)
    disk.close()
    disk.checked(disk_throughput.PROBE_BYTES)
    assert disk.bytes_per_second is None and "no such disk" in caplog.text


def test_the_disks_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real write, past the cache or through it, that leaves nothing; broken off between two pieces."""
    monkeypatch.setattr(disk_speed, "PIECE_BYTES", 2**16)
    for direct in (disk_speed._DIRECT, 0):
        monkeypatch.setattr(disk_speed, "_DIRECT", direct)
        found = disk_speed.measure(tmp_path, 2**20, lambda: False)
        assert found is not None and np.isfinite(found) and found > 0
    calls = iter([False, False, *[True] * 100])
    assert disk_speed.measure(tmp_path, 2**20, lambda: next(calls)) is None
    with pytest.raises(StorageFailed):
        disk_speed.measure(tmp_path / "nowhere", 2**20, lambda: False)
    assert list(tmp_path.iterdir()) == []
