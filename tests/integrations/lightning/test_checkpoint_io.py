"""The CheckpointIO: for Fabric, and for a Trainer whose ModelCheckpoint stays."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from safetensors.torch import load_file
from torch import nn

from holdfast.integrations.lightning import HoldfastCheckpointIO
from holdfast_formats.errors import InvalidRequest
from tests.daemons import RunningDaemon
from tests.integrations.lightning.models import Small, equal, loader, steps, trainer
from tests.kit.daemons import own_daemon

daemon = own_daemon(listen="none")


def trained(fabric: Fabric, model: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        fabric.backward(model(torch.ones(2, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def test_fabric(daemon: RunningDaemon, tmp_path: Path) -> None:
    """What fabric.save() is given comes back from fabric.load(); training that goes on at once changes nothing of it."""
    plugin = HoldfastCheckpointIO("fabric", at=daemon.socket)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    model = nn.Linear(4, 2)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    trained(fabric, model, optimizer, 2)
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    fabric.save(
        tmp_path / "at-2.ckpt", {"model": model, "optimizer": optimizer, "iteration": 2, "more": {"pair": (1, None)}}
    )
    trained(fabric, model, optimizer, 1)
    after = {name: value.clone() for name, value in model.state_dict().items()}
    plugin.teardown()
    assert (tmp_path / "at-2.ckpt").is_symlink()
    stored = load_file(next(Path(os.path.realpath(tmp_path / "at-2.ckpt")).glob("model*.safetensors")))
    assert equal(stored, whole)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    rest = fabric.load(tmp_path / "at-2.ckpt", state)
    assert rest == {"iteration": 2, "more": {"pair": (1, None)}} and equal(dict(model.state_dict()), whole)
    trained(fabric, model, optimizer, 1)
    assert equal(dict(model.state_dict()), after)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_trainer(daemon: RunningDaemon, tmp_path: Path, wrapped: bool) -> None:
    """ModelCheckpoint with the plugin: links, a resumed training, and AsyncCheckpointIO around it."""
    run = f"trainer-{wrapped}"
    plugin: Any = HoldfastCheckpointIO(run, at=daemon.socket)
    plugin = AsyncCheckpointIO(plugin) if wrapped else plugin
    keeps = ModelCheckpoint(every_n_train_steps=2, save_top_k=-1, save_last=True)  # two names a step
    module = Small()
    trainer(tmp_path, keeps, plugins=[plugin]).fit(module, loader())
    if wrapped:
        plugin.checkpoint_io.teardown()
    assert steps(daemon, run) == [2, 4, 6]
    again = Small()
    fitting = trainer(tmp_path, plugins=[HoldfastCheckpointIO(run, at=daemon.socket)], max_epochs=1)
    fitting.validate(again, loader(), ckpt_path=tmp_path / "checkpoints" / "epoch=0-step=6.ckpt", verbose=False)
    assert equal(again.weights(), module.weights())
    fitting.strategy.remove_checkpoint(tmp_path / "checkpoints" / "epoch=0-step=6.ckpt")
    assert not (tmp_path / "checkpoints" / "epoch=0-step=6.ckpt").is_symlink()


def test_the_step(daemon: RunningDaemon, tmp_path: Path) -> None:
    """Of the dictionary, else of the name, else refused; so is what is neither tensor nor JSON, by its path."""
    plugin = HoldfastCheckpointIO("steps", at=daemon.socket)
    plugin.save_checkpoint({"a": torch.ones(2)}, tmp_path / "step-30.ckpt")
    plugin.save_checkpoint({"a": torch.zeros(2), "global_step": 31}, tmp_path / "step-5.ckpt")
    with pytest.raises(InvalidRequest, match=r"neither the dictionary nor the file name last.ckpt"):
        plugin.save_checkpoint({"a": torch.ones(2)}, tmp_path / "last.ckpt")
    with pytest.raises(InvalidRequest, match=r"checkpoint.rest.model: .*Linear cannot be stored"):
        plugin.save_checkpoint({"model": nn.Linear(1, 1), "step": 3}, tmp_path / "whole.ckpt")
    plugin.teardown()
    assert steps(daemon, "steps") == [30, 31]
    assert torch.equal(plugin.load_checkpoint(tmp_path / "step-5.ckpt")["a"], torch.zeros(2))
    assert torch.equal(plugin.load_checkpoint(tmp_path / "step-30.ckpt", map_location="cpu")["a"], torch.ones(2))


def test_files_of_lightnings_own(daemon: RunningDaemon, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "old.ckpt")
    plugin = HoldfastCheckpointIO("old", at=daemon.socket)
    assert torch.equal(plugin.load_checkpoint(tmp_path / "old.ckpt", weights_only=True)["a"], torch.ones(1))
    plugin.remove_checkpoint(tmp_path / "old.ckpt")
    assert not (tmp_path / "old.ckpt").exists()


def test_two_files_of_one_step(daemon: RunningDaemon, tmp_path: Path) -> None:
    """Other tensors under another path would take the first's place: refused. Copies of the same, or fewer, are names."""
    plugin = HoldfastCheckpointIO("gan", at=daemon.socket)
    first = {"model": {"w": torch.ones(3)}, "optimizer": {"m": torch.ones(2)}, "step": 500}
    plugin.save_checkpoint(first, tmp_path / "generator.ckpt")
    with pytest.raises(InvalidRequest, match=r"step 500 was already saved as .*generator\.ckpt with other tensors"):
        plugin.save_checkpoint({"model": {"w": torch.zeros(3)}, "step": 500}, tmp_path / "discriminator.ckpt")
    with pytest.raises(InvalidRequest, match="other tensors"):
        plugin.save_checkpoint({"model": {"v": torch.ones(3)}, "step": 500}, tmp_path / "discriminator.ckpt")
    plugin.save_checkpoint({"model": {"w": torch.ones(3)}, "step": 500}, tmp_path / "weights.ckpt")
    plugin.save_checkpoint({**first, "optimizer": {"m": torch.ones(2)}}, tmp_path / "copy.ckpt")
    plugin.save_checkpoint({**first, "more": torch.ones(1)}, tmp_path / "more.ckpt")
    plugin.save_checkpoint({"model": {"w": torch.full((3,), 2.0)}, "step": 501}, tmp_path / "generator.ckpt")
    plugin.teardown()
    for name in ("weights", "copy", "more"):
        assert plugin.load_checkpoint(tmp_path / f"{name}.ckpt").keys() == {"model", "optimizer", "step", "more"}
    assert torch.equal(plugin.load_checkpoint(tmp_path / "generator.ckpt")["model"]["w"], torch.full((3,), 2.0))


def test_everything_and_the_weights_at_one_step(daemon: RunningDaemon, tmp_path: Path) -> None:
    """Two ModelCheckpoints, one for weights alone: the optimizer stays, whichever saves first."""
    for run, slim_first in (("slim-last", False), ("slim-first", True)):
        whole = ModelCheckpoint(tmp_path / run / "whole", every_n_train_steps=3, save_top_k=-1)
        slim = ModelCheckpoint(
            tmp_path / run / "slim", every_n_train_steps=3, save_top_k=-1, save_weights_only=True, mode="max"
        )
        both = [slim, whole] if slim_first else [whole, slim]
        trainer(tmp_path, *both, plugins=[HoldfastCheckpointIO(run, at=daemon.socket)]).fit(Small(), loader())
        fitting = trainer(tmp_path, plugins=[HoldfastCheckpointIO(run, at=daemon.socket)], max_epochs=2)
        fitting.fit(Small(), loader(), ckpt_path=tmp_path / run / "whole" / "epoch=0-step=6.ckpt")
        assert fitting.global_step == 12


@pytest.mark.parametrize(
    ("dictionary", "name", "step"),
    [
        ({}, "epoch=3-step=40-v2.ckpt", 40),
        ({}, "iter-000120-ckpt.pth", 120),
        ({"epoch": 3}, "epoch=3-loss=0.25.ckpt", 3),
        ({"epoch": 3}, "step_7.ckpt", 7),
        ({}, "epoch=9-loss=0.25.ckpt", 9),
        ({}, "500.ckpt", 500),
        ({}, "loss=0.25.ckpt", None),
        ({"global_step": True}, "llama-3-8b.ckpt", None),
    ],
)
def test_which_step(daemon: RunningDaemon, tmp_path: Path, dictionary: dict[str, Any], name: str, step: int | None) -> None:
    run = f"which-{name.replace('=', '-')}"
    plugin = HoldfastCheckpointIO(run, at=daemon.socket)
    if step is None:
        with pytest.raises(InvalidRequest, match="contains the step"):
            plugin.save_checkpoint({"a": torch.ones(2), **dictionary}, tmp_path / name)
    else:
        plugin.save_checkpoint({"a": torch.ones(2), **dictionary}, tmp_path / name)
    plugin.teardown()
    assert steps(daemon, run) == ([] if step is None else [step])
