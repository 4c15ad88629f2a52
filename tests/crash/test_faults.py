"""Every N-th act of storage fails, for all N until a save passes: nothing committed is lost, nothing partial is visible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError, NoSpace, StorageFailed
from holdfast_service.storage import Buffer, FileWriter, MemoryTier, Tier
from tests.daemon.saver_world import RUN, SaverWorld

ACTS = (
    *("create", "put", "replace", "sync_directory", "publish", "remove_tree"),
    *("read", "read_into", "read_stored", "size", "list"),
)
ACTS_MAX = 200


class Plan:
    """Which act fails next, and how many were seen."""

    def __init__(self) -> None:
        self.fail_at: int | None = None
        self.error: type[CheckpointError] = StorageFailed
        self.seen = 0
        self.failed = ""

    def act(self, name: str) -> None:
        self.seen += 1
        if self.seen == self.fail_at:
            self.failed = name
            raise self.error(f"act {self.seen} ({name}) failed as planned")


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


@pytest.mark.parametrize("error", [StorageFailed, NoSpace])
def test_a_fault_at_every_act_of_a_save(error: type[CheckpointError]) -> None:
    """The save fails by name or passes; the one before restores; the next one works; a restart leaves nothing behind."""
    failed_acts, at = set(), 0
    while at < ACTS_MAX:
        at += 1
        plan = Plan()
        memory = MemoryTier()
        world = SaverWorld(FaultyTier(memory, plan))  # type: ignore[arg-type] - a tier by delegation
        (rank,) = world.launch(1)
        rank.save(1)
        rank.wait(1)
        world.saver.close()
        world.saver = type(world.saver)(world.tier, world.decisions, "node")
        world.saver.join(rank.who)
        plan.fail_at, plan.error, plan.seen = at, error, 0
        rank.save(2)
        outcome = rank.wait(2)
        world.saver.close()
        plan.fail_at = None
        world.saver = type(world.saver)(world.tier, world.decisions, "node")
        world.saver.join(rank.who)
        visible = world.committed()
        assert visible in ([1], [1, 2]) and (outcome.state == "aborted" or 2 in visible), plan.failed
        if outcome.state == "aborted":
            assert outcome.problem["code"] == error.code and "as planned" in outcome.problem["detail"], plan.failed
        rank.save(3)
        assert rank.wait(3).state == "committed", plan.failed
        world.decisions.recover()
        assert memory.list(f"{RUN}/{naming.STAGING}") == [] and memory.list(f"{RUN}/{naming.TRASH}") == []
        assert world.committed()[-1] == 3
        world.close()
        if not plan.failed:
            break
        failed_acts.add(plan.failed)
    assert {"create", "write", "finish", "put", "sync_directory", "publish"} <= failed_acts
    assert at < ACTS_MAX, "a save never passed"
