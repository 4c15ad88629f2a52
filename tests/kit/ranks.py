"""The ranks of a launch, in the process of the test."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from holdfast import Checkpointer
from holdfast_formats.errors import CheckpointError
from tests.daemons import RunningDaemon


class World:
    """The ranks of one launch, in this process."""

    def __init__(
        self, daemon: RunningDaemon, run: str, states: list[dict[str, Any]], launch: str = "a", **more: Any
    ) -> None:
        self.ranks = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WORLD_SIZE", str(len(states)))
            patch.setenv("HOLDFAST_LAUNCH", f"{run}-{launch}")
            for rank, state in enumerate(states):
                patch.setenv("RANK", str(rank))
                self.ranks.append(Checkpointer(run, state, at=daemon.socket, **more))

    def save(self, step: int, **options: Any) -> list[CheckpointError | None]:
        """What became of the save on each rank."""
        tickets = [rank.save(step, **options) for rank in self.ranks]
        errors = []
        for ticket in tickets:
            try:
                ticket.result(180)
                errors.append(None)
            except CheckpointError as error:
                errors.append(error)
        for rank in self.ranks:
            rank._tickets.take_failure()  # it has been told
        return errors

    def restore(self, **options: Any) -> list[int]:
        with ThreadPoolExecutor(len(self.ranks)) as threads:
            return list(threads.map(lambda rank: rank.restore(**options), self.ranks))

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
