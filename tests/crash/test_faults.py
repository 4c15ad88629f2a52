"""The N-th act of each kind fails, for all N until a save passes: nothing committed is lost, nothing partial is visible.

Counted by kind, since a save's threads act in another order each time: so none is left out by chance.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError, NoSpace, StorageFailed
from holdfast_service.storage import Buffer, FileWriter, MemoryTier, Tier
from tests.daemon.saver_world import RUN, SaverWorld

ACTS = (
    *("create", "put", "replace", "sync_directory", "publish", "remove_file", "remove_empty", "remove_tree"),
    *("read", "read_into", "read_stored", "size", "list"),
)
KINDS = (*ACTS, "write", "finish")
TAKE_ROOM = ("create", "write", "put")
NEEDED = {"create", "write", "finish", "put", "sync_directory", "publish"}
ACTS_MAX = 200


class Plan:
    """Which act fails next, the how-manieth of its kind, and how many of that kind were seen."""

    def __init__(self) -> None:
        self.kind, self.fail_at = "", 0
        self.error: type[CheckpointError] = StorageFailed
        self.seen = 0
        self.failed = ""
        self._lock = threading.Lock()

    def act(self, name: str) -> None:
        with self._lock:
            self.seen += name == self.kind
            fails = name == self.kind and self.seen == self.fail_at
        if fails:
            self.failed = f"{name} {self.seen}"
            raise self.error(f"{self.failed} failed as planned")


class FaultyWriter:
    """A writer whose acts can fail."""

    def __init__(self, writer: FileWriter, plan: Plan) -> None:
        self._writer, self._plan = writer, plan

    @property
    def alignment(self) -> int:
        return self._writer.alignment

    def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        self._plan.act("write")
        self._writer.write(offset, buffers)

    def finish(self) -> None:
        self._plan.act("finish")
        self._writer.finish()

    def discard(self) -> None:
        self._writer.discard()


class FaultyTier:
    """A tier that is sound but for the one act that its plan lets fail."""

    def __init__(self, tier: Tier, plan: Plan) -> None:
        self._tier, self._plan = tier, plan

    def __getattr__(self, name: str) -> Any:
        act = getattr(self._tier, name)
        if name not in ACTS:
            return act

        def planned(*arguments: Any) -> Any:
            self._plan.act(name)
            made = act(*arguments)
            return FaultyWriter(made, self._plan) if name == "create" else made

        return planned


@pytest.mark.parametrize(
    ("error", "kinds"),
    [
        pytest.param(StorageFailed, KINDS, marks=pytest.mark.crash_slow),  # test_syscalls.py has EIO at every call
        (NoSpace, TAKE_ROOM),
        pytest.param(NoSpace, KINDS, marks=pytest.mark.crash_slow),
    ],
    ids=["a disk that fails", "a full disk", "any act finds the disk full"],
)
def test_a_fault_at_every_act_of_a_save(error: type[CheckpointError], kinds: Sequence[str]) -> None:
    """The save fails by name or passes; the one before restores; the next one works; a restart leaves nothing behind."""
    failed = set()
    for kind in kinds:
        for at in range(1, ACTS_MAX):
            if not _saves_with_a_fault(kind, at, error):
                break
            failed.add(kind)
        else:
            raise AssertionError(f"a save never passed with its {kind} failing")
    assert failed >= NEEDED.intersection(kinds)


def _saves_with_a_fault(kind: str, at: int, error: type[CheckpointError]) -> bool:
    """Save three times, the second time with the fault; whether there was such an act to fail."""
    plan, memory = Plan(), MemoryTier()
    world = SaverWorld(FaultyTier(memory, plan))  # type: ignore[arg-type] - a tier by delegation
    (rank,) = world.launch(1)
    rank.save(1)
    rank.wait(1)
    world.saver.close()
    world.saver = type(world.saver)(world.tier, world.control, "node")
    world.saver.join(rank.who)
    plan.fail_at, plan.kind, plan.error, plan.seen = at, kind, error, 0
    rank.save(2)
    outcome = rank.wait(2)
    world.saver.close()
    plan.kind = ""
    world.saver = type(world.saver)(world.tier, world.control, "node")
    world.saver.join(rank.who)
    visible = world.committed()
    assert visible in ([1], [1, 2]) and (outcome.state == "aborted" or 2 in visible), plan.failed
    if outcome.state == "aborted":
        assert outcome.problem["code"] == error.code and "as planned" in outcome.problem["detail"], plan.failed
    rank.save(3)
    assert rank.wait(3).state == "committed", plan.failed
    world.control.recovery.recover()
    assert memory.list(f"{RUN}/{naming.STAGING}") == [] and memory.list(f"{RUN}/{naming.TRASH}") == []
    assert world.committed()[-1] == 3
    world.close()
    return bool(plan.failed)
