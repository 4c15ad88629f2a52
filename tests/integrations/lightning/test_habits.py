"""What users and Lightning's own tests do with a ModelCheckpoint: copies, YAML, fast_dev_run, paths read at once."""

from __future__ import annotations

import copy
import gc
import logging
import os
import pickle
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.cli import LightningCLI

from holdfast.integrations.lightning import HoldfastCheckpoint, HoldfastCheckpointIO, load_from_checkpoint
from tests.daemons import RunningDaemon
from tests.integrations.lightning.models import Small, equal, loader, saves, steps, trainer
from tests.kit.daemons import own_daemon

daemon = own_daemon(listen="none")


class Copying(Callback):
    """Copies the other callbacks in the middle of a training."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.callbacks = copy.deepcopy([one for one in trainer.callbacks if one is not self])


def test_a_copied_plugin(daemon: RunningDaemon, tmp_path: Path) -> None:
    """Copies freed the weak references of the first one a second time, and the process crashed."""
    plugin = HoldfastCheckpointIO("plugin", at=daemon.socket)
    plugin.save_checkpoint({"global_step": 1, "state_dict": {f"w{i}": torch.ones(100) for i in range(200)}}, tmp_path / "a")
    copies = [copy.deepcopy(plugin), pickle.loads(pickle.dumps(plugin)), copy.copy(plugin)]
    plugin.teardown()
    del plugin
    gc.collect()
    kept = [torch.ones(100) for _ in range(2000)]
    copies[0].save_checkpoint({"global_step": 2, "state_dict": {"w": kept[0]}}, tmp_path / "b")
    copies[0].teardown()
    assert steps(daemon, "plugin") == [1, 2]
    assert torch.equal(copies[1].load_checkpoint(tmp_path / "b")["state_dict"]["w"], kept[0])


def test_copied_callbacks_and_trainers(daemon: RunningDaemon, tmp_path: Path) -> None:
    """A copy is a callback, or a Trainer, of its own: it trains and saves itself and not the one that was copied."""
    copying = Copying()
    fitted = trainer(tmp_path, saves(daemon, "copies", every_n_train_steps=3), copying, max_epochs=1)
    module = Small()
    fitted.fit(module, loader())
    assert steps(daemon, "copies")[-1] == 6
    torch.save(fitted, tmp_path / "trainer.pt")
    pickle.dumps(copying.callbacks)
    other = copy.deepcopy(fitted)
    assert all(type(vars(other.strategy).get(name)).__name__ != "ReplacedMethod" for name in vars(other.strategy))
    other.fit_loop.max_epochs = 2
    again = Small()
    before = module.weights()
    other.fit(again, loader(), ckpt_path="last")
    assert steps(daemon, "copies")[-1] == 12 and other.global_step == 12 and fitted.global_step == 6
    assert equal(module.weights(), before) and not equal(again.weights(), before)


def test_fast_dev_run(daemon: RunningDaemon, tmp_path: Path) -> None:
    """Its DummyLogger has something under every name, `_log_model` too."""
    trainer(tmp_path, saves(daemon, "fast"), fast_dev_run=True, logger=True).fit(Small(), loader())


def test_yaml(daemon: RunningDaemon, tmp_path: Path) -> None:
    """LightningCLI finds all options, of ModelCheckpoint and of Checkpointer, and checks them."""
    text = f"""
trainer:
  accelerator: cpu
  max_epochs: 1
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  default_root_dir: {tmp_path}
  plugins:
  callbacks:
  - class_path: holdfast.integrations.lightning.HoldfastCheckpoint
    init_args: {{run: yaml, at: {daemon.socket}, save_last: true, every_n_train_steps: 3, keep_last: 2, policy: wait}}
"""
    (tmp_path / "cli.yaml").write_text(text)

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader()

    LightningCLI(Small, Data, args=["fit", "-c", str(tmp_path / "cli.yaml")], save_config_callback=None)
    assert steps(daemon, "yaml") == [3, 6]
    (tmp_path / "cli.yaml").write_text(text.replace("policy: wait", "policy: never"))
    with pytest.raises(SystemExit):
        LightningCLI(Small, Data, args=["fit", "-c", str(tmp_path / "cli.yaml")], save_config_callback=None)


def test_a_state_before_there_is_a_trainer(daemon: RunningDaemon, tmp_path: Path) -> None:
    own = saves(daemon, "state")
    own.best_model_path = "best.ckpt"
    other = HoldfastCheckpoint("other", at=daemon.socket)
    other.load_state_dict(own.state_dict())
    assert other.best_model_path == "" or other.best_model_path == "best.ckpt"


def test_the_path_of_the_newest(daemon: RunningDaemon, tmp_path: Path) -> None:
    """ckpt_path="last" is a directory that is there, also if `at` is a socket."""
    trainer(tmp_path, saves(daemon, "path", every_n_train_steps=6)).fit(Small(), loader())
    again = trainer(tmp_path, saves(daemon, "path", every_n_train_steps=6), max_epochs=2)
    again.fit(Small(), loader(), ckpt_path="last")
    assert Path(again.ckpt_path) == daemon.root / "path" / "checkpoints" / "step-00000006" and again.global_step == 12


@pytest.mark.parametrize("mid", [False, True])
def test_what_is_said_of_an_exception(
    daemon: RunningDaemon, tmp_path: Path, caplog: pytest.LogCaptureFixture, mid: bool
) -> None:
    """That something was saved is said if it was: a save in an accumulation of gradients is refused."""

    class Failing(Small):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == (3 if mid else 4):
                raise KeyError("data")
            return super().training_step(batch, batch_idx)

    keeps = saves(daemon, f"exception-{mid}", save_on_exception=True, every_n_train_steps=100)
    fitting = trainer(tmp_path / str(mid), keeps, accumulate_grad_batches=2)
    with caplog.at_level(logging.INFO), pytest.raises(KeyError):
        if mid:
            with pytest.warns(UserWarning, match="nothing was saved|was not saved"):
                fitting.fit(Failing(), loader())
        else:
            fitting.fit(Failing(), loader())
    told = [record.getMessage() for record in caplog.records if "saved" in record.getMessage()]
    assert bool(told) is not mid and bool(steps(daemon, f"exception-{mid}")) is not mid


def test_a_path_is_read_at_once(daemon: RunningDaemon, tmp_path: Path) -> None:
    """Another plugin of the process reads what was saved, and not what the step held before."""
    weights = {"w": torch.ones(1 << 20)}
    for epoch in (1, 2):
        own = HoldfastCheckpointIO("at-once", at=daemon.socket)
        own.save_checkpoint({"global_step": 4, "epoch": epoch, "state_dict": weights}, tmp_path / f"{epoch}.ckpt")
        found = HoldfastCheckpointIO("at-once", at=daemon.socket).load_checkpoint(tmp_path / f"{epoch}.ckpt")
        own.teardown()
        assert found["epoch"] == epoch


def test_names_that_are_taken(daemon: RunningDaemon, tmp_path: Path) -> None:
    """ModelCheckpoint asks whether a name is free: six saves of one name are six names, as with files."""

    class Measured(Small):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.log("x", float(batch_idx))
            return super().training_step(batch, batch_idx)

    keeps = ModelCheckpoint(tmp_path / "names", "best", monitor="x", every_n_train_steps=1, save_top_k=-1)
    trainer(tmp_path, keeps, plugins=[HoldfastCheckpointIO("names", at=daemon.socket)]).fit(Measured(), loader())
    names = sorted(os.listdir(tmp_path / "names"))
    assert len(names) == 6 == len({os.path.realpath(tmp_path / "names" / name) for name in names})


def test_a_module_of_what_the_plugin_saved(daemon: RunningDaemon, tmp_path: Path) -> None:
    """`load_from_checkpoint` takes both: what the callback saved, and what a Trainer gave to the plugin."""
    module = Small(rate=0.01)
    fitting = trainer(tmp_path, ModelCheckpoint(tmp_path), plugins=[HoldfastCheckpointIO("load", at=daemon.socket)])
    fitting.fit(module, loader())
    loaded = load_from_checkpoint(Small, fitting.checkpoint_callback.best_model_path)
    assert equal(loaded.weights(), module.weights()) and loaded.hparams["rate"] == 0.01
