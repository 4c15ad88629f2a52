"""A gradient scaler that scales the steps of the state's optimizers and is not in the state is named by each save."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from holdfast import Checkpointer
from holdfast.left_out import LeftOutWarning
from tests.daemons import RunningDaemon
from tests.kit.daemons import own_daemon

daemon = own_daemon(listen="none")


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(2, 2)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()


def made(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=8.0, **options)


@pytest.mark.parametrize("make", [made, lambda: ShardedGradScaler("cpu", init_scale=8.0)], ids=["plain", "sharded"])
@pytest.mark.parametrize("scheduled", [False, True])
def test_a_scaler_that_is_not_in_the_state_is_named(
    tmp_path: Path,
    make: Callable[[], torch.amp.GradScaler],
    scheduled: bool,
    daemon: RunningDaemon,
    single_process_group: None,
) -> None:
    """Once it has scaled a step, until it is in the state."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    state: dict[str, Any] = {"model": model, "optim": optimizer}
    if scheduled:  # its step() is wrapped then
        state["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with Checkpointer(tmp_path.name, state, at=daemon.socket) as checkpointer:
        scaler = make()
        checkpointer.save(0, wait="durable")
        stepped(model, optimizer, scaler)
        with pytest.warns(
            LeftOutWarning, match=r"the GradScaler that steps the AdamW, .*: write state\[\"scaler\"\] = scaler"
        ):
            checkpointer.save(1, wait="durable")
        state["scaler"] = scaler
        stepped(model, optimizer, scaler)
        checkpointer.save(2, wait="durable")


class Amp:
    """An object of the user's own, which saves its scaler by itself."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler

    def state_dict(self) -> Any:
        return self.scaler.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.scaler.load_state_dict(state)


@pytest.mark.parametrize(
    ("scaler", "entries", "named"),
    [
        (made(), {}, True),
        (made(), {"scaler": made()}, True),  # another one, such as the one before it
        (made(enabled=False), {}, False),
        (ours := made(), {"scaler": ours}, False),
        (own := made(), {"amp": Amp(own)}, False),
    ],
    ids=["none", "another", "disabled", "given", "inside an object"],
)
def test_only_what_is_lost_is_named(
    daemon: RunningDaemon, tmp_path: Path, scaler: torch.amp.GradScaler, entries: dict[str, Any], named: bool
) -> None:
    """Not a scaler of an optimizer outside the state, and not one that is gone."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer, outside = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(other.parameters())
    with Checkpointer(tmp_path.name, {"model": model, "optim": optimizer, **entries}, at=daemon.socket) as checkpointer:
        gone, elsewhere = made(), made()
        stepped(model, optimizer, gone)
        stepped(other, outside, elsewhere)
        del gone
        gc.collect()
        assert not any("GradScaler" in note for note in checkpointer.save(1, wait="durable").notes)
        stepped(model, optimizer, scaler)
        if not named:
            assert not any("GradScaler" in note for note in checkpointer.save(2, wait="durable").notes)
            return
        with pytest.warns(LeftOutWarning, match="GradScaler"):
            checkpointer.save(2, wait="durable")
