"""What the adapter does not understand is refused by name, before anything is staged (E4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast_formats.errors import InvalidRequest
from tests.daemons import RunningDaemon
from tests.integrations.lightning.models import Small, loader, saves, steps, trainer
from tests.kit.daemons import own_daemon

daemon = own_daemon(listen="none")


class OtherStrategy(SingleDeviceStrategy):
    """One that saves in a way of its own."""

    def save_checkpoint(self, *given: Any, **named: Any) -> None:
        """Save nothing."""


class DeepSpeedStrategy(SingleDeviceStrategy):
    """What Lightning's is called; making that one needs DeepSpeed."""


class Uploads(CSVLogger):
    """As W&B's and MLflow's."""

    _log_model = "all"


def made(daemon: RunningDaemon, directory: Path, run: str, **options: Any) -> Any:
    return trainer(directory, saves(daemon, run, every_n_train_steps=1), **options)


MADE: dict[str, tuple[Callable[..., Any], str]] = {
    "strategy": (lambda d, p, r: made(d, p, r, strategy=OtherStrategy()), "strategy OtherStrategy is not supported"),
    "deepspeed": (lambda d, p, r: made(d, p, r, strategy=DeepSpeedStrategy()), "DeepSpeedStrategy is not supported"),
    "spawn": (lambda d, p, r: made(d, p, r, strategy=DDPStrategy(start_method="spawn")), "start method 'spawn'"),
    "plugin": (lambda d, p, r: made(d, p, r, plugins=[AsyncCheckpointIO(TorchCheckpointIO())]), "plugin AsyncCheckpointIO"),
    "two": (lambda d, p, r: trainer(p, saves(d, r), saves(d, r, monitor="val_loss")), "two HoldfastCheckpoint"),
    "logger": (lambda d, p, r: made(d, p, r, logger=Uploads(p)), "Uploads.log_model"),
    "swa": (lambda d, p, r: trainer(p, saves(d, r), StochasticWeightAveraging(0.01)), "StochasticWeightAveraging"),
    "bucket": (lambda d, p, r: trainer(p, saves(d, r, dirpath="memory://bucket/run")), "not a directory on this machine"),
}


@pytest.mark.parametrize("case", MADE)
def test_trainers(daemon: RunningDaemon, tmp_path: Path, case: str) -> None:
    make, message = MADE[case]
    fitting = make(daemon, tmp_path, f"trainer-{case}")
    strategy = fitting.strategy
    if case == "spawn":  # its launcher would start another process, which is refused as well, in there
        strategy._launcher = None
        strategy.setup_environment = lambda: None
        strategy.broadcast = lambda value, src=0: value
    with pytest.raises(InvalidRequest, match=message):
        fitting.fit(Small(), loader())
    assert steps(daemon, f"trainer-{case}") == []


class Plateau(Small):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "x", "interval": "step"}}


class Network(Small):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.save_hyperparameters()


class Reads(Small):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"].pop("net.weight")


class Replaces(Small):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {}


class Iterates(Small):
    def training_step(self, dataloader_iter: Any) -> torch.Tensor:
        batch, _, _ = next(dataloader_iter)
        return self.net(batch[0]).square().mean()


MODULES: dict[str, tuple[Callable[[], Any], str]] = {
    "plateau": (Plateau, "interval 'step'"),
    "hyperparameter": (lambda: Network(nn.Linear(1, 1)), r"lightning.hyper_parameters.net: .*Linear cannot be stored"),
    "reads weights": (Reads, r"reads checkpoint\['state_dict'\]"),
    "replaces weights": (Replaces, r"has replaced checkpoint\['state_dict'\]"),
    "dataloader_iter": (Iterates, "takes a dataloader_iter"),
}


@pytest.mark.parametrize("case", MODULES)
def test_modules(daemon: RunningDaemon, tmp_path: Path, case: str) -> None:
    make, message = MODULES[case]
    run = case.replace(" ", "-")
    with pytest.raises(InvalidRequest, match=message):
        made(daemon, tmp_path, run).fit(make(), loader())
    assert steps(daemon, run) == []


LOADERS: dict[str, tuple[Callable[[], Any], int, str]] = {
    "mixed": (lambda: [loader(), StatefulDataLoader(loader().dataset, batch_size=2)], 1, "others have none"),
    "cycled": (lambda: CombinedLoader([loader(), loader(4)], "max_size_cycle"), 3, "restarted within the epoch"),
}


@pytest.mark.parametrize("case", LOADERS)
def test_loaders(daemon: RunningDaemon, tmp_path: Path, case: str) -> None:
    """Refused within an epoch; at its end there is nothing to find again."""

    class Several(Small):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return sum(self.net(one[0]).square().mean() for one in batch)

    make, step, message = LOADERS[case]
    with pytest.raises(InvalidRequest, match=message):
        trainer(tmp_path, saves(daemon, case, every_n_train_steps=step)).fit(Several(), make())
    assert steps(daemon, case) == []
    trainer(tmp_path, saves(daemon, f"{case}-epoch", every_n_epochs=1)).fit(Several(), make())
    assert steps(daemon, f"{case}-epoch") == [6]


def test_arguments(daemon: RunningDaemon, tmp_path: Path) -> None:
    """storage_options; a name where a file is; and other ranks' checkpoints are no path."""
    callback = saves(daemon, "arguments", save_top_k=0)
    fitting = trainer(tmp_path, callback)
    fitting.fit(Small(), loader())
    with pytest.raises(InvalidRequest, match="storage_options"):
        fitting.save_checkpoint(tmp_path / "x.ckpt", storage_options={"a": 1})
    (tmp_path / "file.ckpt").write_text("mine")
    fitting.save_checkpoint(tmp_path / "file.ckpt")  # training goes on, without the link
    assert (tmp_path / "file.ckpt").read_text() == "mine"
    with pytest.raises(TypeError, match="unexpected keyword"):
        saves(daemon, "arguments", every_n_steps=3)
    with pytest.raises(InvalidRequest, match="run"):
        saves(daemon, "no/run")


def test_a_save_without_loaders_of_its_own(daemon: RunningDaemon, tmp_path: Path) -> None:
    """Loaders that are only iterable are no reason to refuse."""

    class Batches:
        def __iter__(self) -> Iterator[Any]:
            return iter([[torch.ones(2, 4) * number] for number in range(4)])

        def __len__(self) -> int:
            return 4

    batches = Batches()
    trainer(tmp_path, saves(daemon, "lists", every_n_train_steps=1, save_top_k=-1)).fit(Small(), batches)
    assert steps(daemon, "lists") == [1, 2, 3, 4]
    again = Small()
    fitting = trainer(tmp_path, saves(daemon, "lists"))
    fitting.fit(again, batches, ckpt_path=2)
    assert fitting.global_step == 4 and isinstance(loader(), DataLoader)
