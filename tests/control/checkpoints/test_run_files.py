"""run.json: read, and changed without losing what others changed."""

from __future__ import annotations

import threading

import pytest

from holdfast_formats.errors import CorruptManifest, LimitExceeded, PreconditionFailed
from holdfast_formats.rest.retention import STEPS_MAX, Best, RetentionPolicy
from holdfast_service.control.checkpoints import run_files
from holdfast_service.control.checkpoints.run_files import RunFile, RunFiles, read_run_file, write_run_file
from holdfast_service.storage import MemoryTier

POLICY = RetentionPolicy(last=2, every_seconds=3600, best=(Best(metric="loss", count=3),), steps=(7, 5, 7))


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier()


def test_round_trip(tier: MemoryTier) -> None:
    """What is written is read; without a file the defaults are."""
    assert read_run_file(tier, "run") == RunFile(format=1, keep_last=None, pins=(), labels={}, policy=None)
    written = RunFile(keep_last=3, pins=(5, 100), labels={"best": (5,)}, policy=POLICY)
    write_run_file(tier, "run", written)
    assert read_run_file(tier, "run") == written
    assert written.policy is not None
    assert written.policy.steps == (5, 7)


def test_a_file_from_before_policies_is_read(tier: MemoryTier) -> None:
    """The first format had no policy: then `keep_last` is the policy in force."""
    tier.put("run/run.json", b'{"format":1,"keep_last":3,"pins":[500],"labels":{"best":[500]}}\n')
    read = read_run_file(tier, "run")
    assert (read.pins, read.labels_of(500), read.labels_of(501)) == ((500,), ("best",), ())
    assert read.in_force == RetentionPolicy(last=3)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"format": 2}',
        b'{"keep_last": 0}',
        b'{"pins": [-1]}',
        b'{"pins": ["5"]}',
        b'{"surprise": 1}',
        b'{"policy": {"last": 0}}',
        b'{"policy": {"newest": 3}}',
        b'{"policy": {"every_seconds": -1}}',
        b'{"policy": {"best": [{"metric": "loss", "count": 1, "mode": "least"}]}}',
        b" " * (run_files.RUN_FILE_BYTES_MAX + 1),
    ],
)
def test_an_unreadable_file_is_named(tier: MemoryTier, data: bytes) -> None:
    """A run file that is not ours is never taken for one without pins."""
    tier.put("run/run.json", data)
    with pytest.raises(CorruptManifest, match=r"run/run\.json"):
        read_run_file(tier, "run")


def test_too_many_marks_are_refused(tier: MemoryTier) -> None:
    """A file over its limits is never written."""
    with pytest.raises(LimitExceeded, match=f"{STEPS_MAX + 1} marks"):
        write_run_file(tier, "run", RunFile(pins=tuple(range(STEPS_MAX + 1))))
    assert tier.list("run") == []


def test_pins_and_labels() -> None:
    """Setting twice is setting once; a label with no step left is none."""
    file = run_files.pinned(run_files.pinned(RunFile(), 9), 9)
    file = run_files.labelled(run_files.labelled(file, 9, "best"), 4, "best")
    assert (file.pins, file.labels) == ((9,), {"best": (4, 9)})
    file = run_files.unlabelled(run_files.unpinned(file, 9), 9, "best")
    assert (file.pins, file.labels) == ((), {"best": (4,)})
    assert run_files.unlabelled(run_files.unlabelled(file, 4, "best"), 4, "nobody") == RunFile()


def test_a_policy_is_set_by_its_validator(tier: MemoryTier) -> None:
    """The tag changes with the policy in force and with nothing else; a stale one changes nothing."""
    files = RunFiles(tier)
    first = files.read("run").etag
    files.change("run", lambda file: run_files.pinned(file, 5))
    assert files.read("run").etag == first
    second = files.set_policy("run", POLICY, f'"other", {first}').etag
    assert second != first
    with pytest.raises(PreconditionFailed) as caught:
        files.set_policy("run", RetentionPolicy(last=1), first)
    assert caught.value.members["etag"] == second
    assert files.read("run") == RunFile(pins=(5,), policy=POLICY)
    assert files.set_policy("run", RetentionPolicy(last=1), "*").in_force.last == 1
    files.change("run", lambda file: file.model_copy(update={"keep_last": 9}))
    assert files.read("run").in_force.last == 1


def test_setting_what_holds_already_is_a_change_of_who_decides() -> None:
    """A policy equal to the trainer's default has another tag: from then on `keep_last` counts no more."""
    default = RunFile(keep_last=3)
    chosen = RunFile(keep_last=3, policy=RetentionPolicy(last=3))
    assert default.in_force == chosen.in_force
    assert default.etag != chosen.etag


def test_no_change_is_lost(tier: MemoryTier) -> None:
    """Changes from many threads all end up in the file."""
    files = RunFiles(tier)

    def pin(first: int) -> None:
        for step in range(first, 40, 4):
            files.change("run", lambda file, step=step: run_files.pinned(file, step))  # type: ignore[misc]

    threads = [threading.Thread(target=pin, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert files.read("run").pins == tuple(range(40))


class TestShown:
    """What lists show of a run's file where reading it costs a request."""

    def test_it_is_read_once(self, tier: MemoryTier) -> None:
        """Within the time that it may be old; each time without such a time."""
        remembering, reading = RunFiles(tier, shown_s=3600.0), RunFiles(tier)
        assert remembering.shown("run").pins == reading.shown("run").pins == ()
        write_run_file(tier, "run", RunFile(pins=(5,)))
        assert remembering.shown("run").pins == () and reading.shown("run").pins == (5,)
        assert RunFiles(tier, shown_s=0.0).shown("run").pins == (5,)
        assert remembering.read("run").pins == (5,), "what decides reads it always"

    def test_what_this_process_changes_is_shown_at_once(self, tier: MemoryTier) -> None:
        """Also by others that lock the file, and once the run is gone."""
        files = RunFiles(tier, shown_s=3600.0)
        assert files.shown("run").pins == ()
        files.change("run", lambda file: run_files.pinned(file, 5))
        assert files.shown("run").pins == (5,)
        with files.exclusively("run"):
            write_run_file(tier, "run", RunFile(owner="me"))
        assert files.shown("run").owner == "me"
        with files.leaving("run"):
            tier.remove_file("run/run.json")
        assert files.shown("run") == RunFile()

    def test_a_change_while_it_is_read(self, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch) -> None:
        """What was read before is not remembered."""
        files = RunFiles(tier, shown_s=3600.0)
        read = files.read

        def slowly(run: str) -> RunFile:
            found = read(run)
            monkeypatch.setattr(files, "read", read)
            files.change(run, lambda file: run_files.pinned(file, 5))
            return found

        monkeypatch.setattr(files, "read", slowly)
        assert files.shown("run").pins == () and files.shown("run").pins == (5,)
