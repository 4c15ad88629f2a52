"""The end of a save that failed: the daemon knows of it before it is asked for the next one."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from holdfast import Checkpointer
from holdfast.stage import save_task
from holdfast.stage.slots import Slot
from holdfast_formats.errors import CheckpointError, TornSnapshot
from tests.daemons import RunningDaemon
from tests.kit.daemons import own_daemon

daemon = own_daemon(listen="none")
LATE_S = 3 * save_task.ABANDON_WAIT_S


def test_a_step_is_saved_again_after_its_save_failed(
    daemon: RunningDaemon, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late the daemon is told of the failure, the second save of the step does not fail with the first one."""
    seal, abandon, torn = Slot.seal, Slot.abandon, [TornSnapshot("a tensor changed during the save")]

    def sealed_later(slot: Slot, table: bytes, size: int) -> str:
        if torn:
            raise torn.pop()
        return seal(slot, table, size)

    def told_late(slot: Slot, error: CheckpointError) -> None:
        time.sleep(LATE_S)
        abandon(slot, error)

    monkeypatch.setattr(Slot, "seal", sealed_later)
    monkeypatch.setattr(Slot, "abandon", told_late)
    model = nn.Linear(4, 4)
    with Checkpointer(run, {"model": model}, at=daemon.socket) as checkpointer:
        with pytest.raises(TornSnapshot):
            checkpointer.save(10).result(60)
        with pytest.warns(UserWarning, match="torn-snapshot"):
            checkpointer.save(10, wait="durable")
        weight = model.weight.detach().clone()
        model.weight.data.zero_()
        checkpointer.restore(10)
        assert torch.equal(model.weight, weight)
