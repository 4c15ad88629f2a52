"""The slot of the next save is prepared while one takes long, and only then; a save that ends soon leaves memory alone."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from holdfast import Checkpointer
from holdfast.stage import next_slot
from holdfast.stage.next_slot import RECENT_SAVES, SHARE, UNKNOWN_S, SavePace
from holdfast.stage.preallocation import Preallocation
from holdfast_formats import memory_bounds
from holdfast_formats.memory_bounds import Bound
from holdfast_formats.staging.slot_pages import have_pages
from tests.daemons import RunningDaemon, running

HOUR_S = 3600.0
_runs = itertools.count()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    with running(tmp_path_factory.mktemp("ahead") / "root") as daemon:
        yield daemon


@pytest.fixture
def long_save(daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Checkpointer]:
    """A rank whose saves end only when it leaves, because another one saves nothing."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "HOLDFAST_LAUNCH": "a"}.items():
        monkeypatch.setenv(name, value)
    checkpointer = Checkpointer(f"long-{next(_runs)}", {"x": torch.ones(2**18)}, at=daemon.socket)
    checkpointer.prepare(wait=True)
    yield checkpointer
    checkpointer.close(wait=False)


def pages(checkpointer: Checkpointer) -> set[int]:
    """The slots of a Checkpointer that have memory."""
    slots = checkpointer._reservation.slots
    assert slots is not None
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the listing itself
            if f"memfd:holdfast-{checkpointer.run}-rank0" in os.readlink(entry):
                return have_pages(int(entry.name), slots.geometry)
    raise AssertionError("no shared memory")


def ahead(checkpointer: Checkpointer) -> Preallocation:
    made = checkpointer._reservation._ahead
    assert made is not None
    return made


def test_a_save_looms_at_half_of_the_shortest_recent_interval() -> None:
    """Before the second save nothing is known; an interval of long ago does not count."""
    moments = iter([100.0, 110.0, 114.0, *(200.0 + 20 * save for save in range(RECENT_SAVES + 1))])
    pace = SavePace(lambda: next(moments))
    assert [pace.begins() for _ in range(3)] == [UNKNOWN_S, SHARE * 10, SHARE * 4]
    assert [pace.begins() for _ in range(RECENT_SAVES)][-2:] == [SHARE * 4, SHARE * 20]


def test_the_next_slot_is_ready_before_a_save_overlaps(long_save: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save that overlaps then is in that slot, and nothing is left to prepare; for a third one there is no slot."""
    monkeypatch.setattr(next_slot, "UNKNOWN_S", 0.0)
    long_save.save(1, wait="staged")
    ahead(long_save).join()
    slots = long_save._reservation.slots
    assert slots is not None and pages(long_save) == {0, 1} and slots.is_ready(1)
    monkeypatch.setattr(next_slot, "SHARE", 0.0)
    second = long_save.save(2, wait="staged")
    ahead(long_save).join()
    assert second.staged and pages(long_save) == {0, 1}


def test_a_save_that_ends_in_time_takes_no_more_memory(daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for the moment ends with the save. No slot is prepared beside a save that the training waits for."""
    monkeypatch.setattr(next_slot, "UNKNOWN_S", HOUR_S)
    with Checkpointer("short", {"x": torch.ones(2**18)}, at=daemon.socket) as checkpointer:
        checkpointer.save(1).result(60)
        ahead(checkpointer).join()
        assert pages(checkpointer) == {0}
    with Checkpointer("awaited", {"x": torch.ones(2**18)}, at=daemon.socket) as checkpointer:
        checkpointer.save(1, wait="durable")
        assert checkpointer._reservation._ahead is None


def test_a_new_save_and_the_end_of_the_training_do_not_wait(
    long_save: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next save and `close()` end what still waits for the moment."""
    monkeypatch.setattr(next_slot, "UNKNOWN_S", HOUR_S)
    monkeypatch.setattr(next_slot, "SHARE", HOUR_S)
    long_save.save(1, wait="staged")
    first = ahead(long_save)
    long_save.save(2, wait="staged")
    first.join()
    last = ahead(long_save)
    assert last is not first
    long_save._reservation.close()
    last.join()


def test_the_last_memory_is_not_taken_ahead_of_need(long_save: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory to spare in the rank's control group, the slot is left alone, and the save goes on."""
    full = Bound("memory.max", 2**20, 0, "2:1")
    monkeypatch.setattr(memory_bounds, "of_process", lambda: [full])
    monkeypatch.setattr(next_slot, "UNKNOWN_S", 0.0)
    assert long_save.save(1, wait="staged").staged
    ahead(long_save).join()
    assert pages(long_save) == {0}


def test_a_save_does_without_a_thread_that_cannot_start(daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of the interpreter: neither its own memory nor the next one's is prepared then."""

    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "holdfast-prepare":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with Checkpointer("threadless", {"x": torch.ones(2**18)}, at=daemon.socket) as checkpointer:
        assert checkpointer.save(1).result(60).step == 1
