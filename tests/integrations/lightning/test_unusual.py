"""Trainings that are legitimate and seldom: they resume exactly, or are refused by name."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast_formats.errors import InvalidRequest
from tests.daemons import RunningDaemon
from tests.integrations.lightning.models import Small, loader, saves, steps, trainer
from tests.kit.daemons import own_daemon

ROWS = 12


daemon = own_daemon(listen="none")


class Tracing(Small):
    """Notes the rows and the loss of every step; `dies` before the training of so many batches."""

    def __init__(self, dies: int | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 2))
        self.dies, self.steps = dies, []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.dies is not None and self.trainer.fit_loop.epoch_loop.total_batch_idx >= self.dies:
            raise RuntimeError("dies")
        loss = self.net(batch[0]).square().mean()
        self.steps.append((batch[0].sum().item(), loss.item()))
        return loss


def rows() -> TensorDataset:
    return TensorDataset(torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1)))


def shuffled(count: int = ROWS) -> DataLoader:
    return DataLoader(TensorDataset(rows().tensors[0][:count]), batch_size=2, shuffle=True)


class Stream(IterableDataset):
    """Goes on where it was, in the next epoch too."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        while True:
            self.at += 1
            yield (torch.full((4,), float(self.at)),)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def resumed(fit: Callable[[Tracing], L.Trainer], dies: int, module: type[Tracing] = Tracing) -> None:
    """`fit` trains and goes on in the run: what dies and is started again is the training that was not disturbed."""
    L.seed_everything(1, verbose=False)
    whole = module()
    fit(whole, run="whole")
    L.seed_everything(1, verbose=False)
    disturbed = module(dies)
    with pytest.raises(RuntimeError, match="dies"):
        fit(disturbed, run="dies")
    L.seed_everything(99, verbose=False)
    again = module()
    fit(again, run="dies")
    assert 0 < len(again.steps) < len(whole.steps) and again.steps == whole.steps[-len(again.steps) :]
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), again.parameters(), strict=True))


def test_training_goes_on_from_the_newest_that_has_optimizers(daemon: RunningDaemon, tmp_path: Path) -> None:
    """Weights alone, saved last, are no training to go on from."""
    fitting = trainer(tmp_path, saves(daemon, "newest", every_n_train_steps=2, save_top_k=-1))
    fitting.fit(Small(), loader())
    fitting = trainer(tmp_path, saves(daemon, "newest", every_n_train_steps=100), max_steps=7, max_epochs=-1)
    fitting.fit(Small(), loader(), ckpt_path="last")
    fitting.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert steps(daemon, "newest")[-2:] == [6, 7]
    fitting = trainer(tmp_path, saves(daemon, "newest", every_n_train_steps=2), max_epochs=2)
    fitting.fit(Small(), loader(), ckpt_path="last")
    assert fitting.global_step == 12 and 8 in steps(daemon, "newest")


def test_a_module_that_is_made_when_it_is_loaded(daemon: RunningDaemon, tmp_path: Path) -> None:
    """on_load_checkpoint replaces what was filled already: it is filled again, in a training and in a validation."""

    class Rebuilt(Tracing):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 2))

    def fit(module: Tracing, run: str) -> None:
        callback = saves(daemon, f"rebuilt-{run}", every_n_train_steps=2)
        trainer(tmp_path / run, callback, max_epochs=2).fit(module, shuffled(), ckpt_path="last")

    resumed(fit, 5, Rebuilt)
    trained, found = Rebuilt(), Rebuilt()
    trainer(tmp_path / "v", saves(daemon, "rebuilt-v", every_n_train_steps=2)).fit(trained, loader(), ckpt_path="last")
    trainer(tmp_path / "v", saves(daemon, "rebuilt-v")).validate(found, loader(4), ckpt_path="last", verbose=False)
    assert all(torch.equal(one, other) for one, other in zip(trained.parameters(), found.parameters(), strict=True))


def test_a_limit_on_batches_with_a_loader_without_a_length(daemon: RunningDaemon, tmp_path: Path) -> None:
    """Lightning fetches a batch ahead, or not: with a limit it does not."""

    def fit(module: Tracing, run: str) -> None:
        callback = saves(daemon, f"limit-{run}", every_n_train_steps=2)
        fitting = trainer(tmp_path / run, callback, limit_train_batches=5, max_epochs=3)
        fitting.fit(module, StatefulDataLoader(Stream(), batch_size=2), ckpt_path="last")

    resumed(fit, 8)


def test_a_stream_that_goes_on_in_the_next_epoch(daemon: RunningDaemon, tmp_path: Path) -> None:
    """limit_train_batches ends an epoch before its data: the next one begins where the stream was."""

    def fit(module: Tracing, run: str) -> None:
        fitting = trainer(tmp_path / run, saves(daemon, f"ends-{run}"), limit_train_batches=5, max_epochs=3)
        fitting.fit(module, StatefulDataLoader(Stream(), batch_size=2), ckpt_path="last")

    resumed(fit, 8)


def test_weights_that_are_changed_before_training_goes_on(daemon: RunningDaemon, tmp_path: Path) -> None:
    """They are no other name of what was restored, and must not take its place."""

    class Changed(Tracing):
        def on_train_start(self) -> None:
            if self.trainer.global_step:
                torch.nn.init.zeros_(self.net[0].weight)
                self.trainer.save_checkpoint(tmp_path / "changed.ckpt")

    trainer(tmp_path, saves(daemon, "changed", every_n_train_steps=3)).fit(Changed(), shuffled(), ckpt_path="last")
    with pytest.raises(InvalidRequest, match="the weights were changed after"):
        fitting = trainer(tmp_path, saves(daemon, "changed", every_n_train_steps=3), max_epochs=2)
        fitting.fit(Changed(), shuffled(), ckpt_path="last")
    assert not os.path.lexists(tmp_path / "changed.ckpt")


class Ordered(IterableDataset):
    """Remembers how much of its order was read, and draws another one when it is all read."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        data = rows().tensors[0]
        self.order = self.order or torch.randperm(ROWS).tolist()
        while self.order:
            yield (data[self.order.pop()],)


class Plain:
    """No DataLoader: draws the order of an epoch when it is asked for its rows."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        data = rows().tensors[0]
        for row in torch.randperm(ROWS).tolist():
            yield (data[row][None],)


@pytest.mark.parametrize("plain", [False, True], ids=["a DataLoader", "an iterable"])
def test_nothing_is_read_before_the_epoch_begins(daemon: RunningDaemon, tmp_path: Path, plain: bool) -> None:
    """Resumed between two epochs: Lightning's first iterator would take rows of the one that is used."""

    def fit(module: Tracing, run: str) -> None:
        data = Plain() if plain else DataLoader(Ordered(), batch_size=2)
        callback = saves(daemon, f"read-{plain}-{run}", every_n_epochs=1)
        trainer(tmp_path / run, callback, max_epochs=3).fit(module, data, ckpt_path="last")

    resumed(fit, 8 if not plain else 15)


def test_a_training_that_is_extended(daemon: RunningDaemon, tmp_path: Path) -> None:
    """max_steps ends it within an epoch; with a greater one it goes on there, also from a save after its end."""
    L.seed_everything(1, verbose=False)
    whole = Tracing()
    trainer(tmp_path, max_steps=15, max_epochs=-1).fit(whole, shuffled())
    for run, options in (("steps", {"every_n_train_steps": 2}), ("epochs", {}), ("final", {"every_n_train_steps": 2})):
        L.seed_everything(1, verbose=False)
        fitting = trainer(tmp_path / run, saves(daemon, f"more-{run}", **options), max_steps=8, max_epochs=-1)
        fitting.fit(Tracing(), shuffled())
        if run == "final":
            fitting.save_checkpoint(tmp_path / "final.ckpt")
        L.seed_everything(9, verbose=False)
        again = Tracing()
        fitting = trainer(tmp_path / run, saves(daemon, f"more-{run}"), max_steps=15, max_epochs=-1)
        fitting.fit(again, shuffled(), ckpt_path="last")
        assert again.steps == whole.steps[8:], run


def test_a_start_that_does_not_come_to_train(daemon: RunningDaemon, tmp_path: Path) -> None:
    """Its saves leave the checkpoint that it restored as it is; the loader is the user's again; nothing stays open."""

    def begun(most: int) -> tuple[Tracing, L.Trainer, DataLoader]:
        module, data = Tracing(), shuffled()
        fitting = trainer(tmp_path, saves(daemon, "idle", every_n_train_steps=4), max_steps=most, max_epochs=-1)
        fitting.fit(module, data, ckpt_path="last")
        return module, fitting, data

    L.seed_everything(1, verbose=False)
    whole = Tracing()
    trainer(tmp_path, max_steps=15, max_epochs=-1).fit(whole, shuffled())
    L.seed_everything(1, verbose=False)
    begun(8)
    before = sorted((path, path.stat().st_ino) for path in (daemon.root / "idle" / "checkpoints").iterdir())
    _, fitting, data = begun(8)
    fitting.save_checkpoint(tmp_path / "again.ckpt")
    assert [len(batch) for (batch,) in data] == [2] * 6
    assert fitting.checkpoint_callback.holdfast._checkpointer is None
    assert sorted((path, path.stat().st_ino) for path in (daemon.root / "idle" / "checkpoints").iterdir()) == before
    assert os.path.realpath(tmp_path / "again.ckpt").endswith("step-00000008")
    assert begun(15)[0].steps == whole.steps[8:]


def test_a_schedule_of_accumulation(daemon: RunningDaemon, tmp_path: Path) -> None:
    """How many batches a step has was said at the beginning of the epoch that is resumed."""

    def fit(module: Tracing, run: str) -> None:
        callbacks = [saves(daemon, f"schedule-{run}", every_n_train_steps=1), GradientAccumulationScheduler({0: 1, 1: 3})]
        trainer(tmp_path / run, *callbacks, max_epochs=3).fit(module, shuffled(), ckpt_path="last")

    resumed(fit, 10)


class Repeating:
    def __init__(self, inner: Any) -> None:
        self.sampler = inner

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class Lasting(DataLoader):
    """Makes its one iterator when it is made itself, as timm's MultiEpochsDataLoader does."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        vars(self)["batch_sampler"] = Repeating(self.batch_sampler)
        self.lasting = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            yield next(self.lasting)


def test_a_loader_that_does_not_ask_its_sampler_anew(daemon: RunningDaemon, tmp_path: Path) -> None:
    def fit(module: Tracing, run: str) -> None:
        callback = saves(daemon, f"lasting-{run}", every_n_train_steps=2)
        trainer(tmp_path / run, callback).fit(module, Lasting(rows(), batch_size=2), ckpt_path="last")

    resumed(fit, 5)


class Signalled(Tracing):
    """Sends itself a signal in a step: in the middle of training_step, or when the weights are written already."""

    at, when = 3, "training_step"

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == self.at and self.when == "training_step":
            os.kill(os.getpid(), signal.SIGUSR2)
        return super().training_step(batch, batch_idx)

    def optimizer_step(self, epoch: int, batch_idx: int, *given: Any, **options: Any) -> None:
        super().optimizer_step(epoch, batch_idx, *given, **options)
        if batch_idx == self.at and self.when == "optimizer_step":
            os.kill(os.getpid(), signal.SIGUSR2)


@pytest.mark.parametrize("when", ["training_step", "optimizer_step"])
def test_a_save_in_a_signal_handler(daemon: RunningDaemon, tmp_path: Path, when: str) -> None:
    """It is made when the step is over: loops and weights of one moment."""
    run = f"signal-{when}"
    L.seed_everything(1, verbose=False)
    whole = Signalled()
    whole.when = when
    fitting = trainer(tmp_path, saves(daemon, run, every_n_train_steps=100, every_n_epochs=0))
    before = signal.signal(signal.SIGUSR2, lambda *_: fitting.save_checkpoint(tmp_path / "now.ckpt"))
    try:
        fitting.fit(whole, shuffled(), ckpt_path="last")
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert steps(daemon, run) == [4]
    L.seed_everything(9, verbose=False)
    again = Tracing()
    trainer(tmp_path, saves(daemon, run, every_n_train_steps=100, every_n_epochs=0)).fit(again, shuffled(), ckpt_path=4)
    assert again.steps == whole.steps[4:]


class Interrupted(torch.optim.SGD):
    """Has written some weights when an exception comes."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if loss is not None and self.param_groups[0].setdefault("count", 0) == 3:
            raise RuntimeError("dies")
        self.param_groups[0]["count"] += 1
        return loss


@pytest.mark.parametrize("when", ["in the forward", "in the update"])
def test_a_save_on_an_exception(daemon: RunningDaemon, tmp_path: Path, when: str) -> None:
    """Before weights were written it is the step before, exactly; else nothing is saved."""
    run = when.replace(" ", "-")

    class Dies(Tracing):
        def configure_optimizers(self) -> Any:
            return Interrupted(self.parameters(), lr=0.05) if when == "in the update" else super().configure_optimizers()

    callback = saves(daemon, run, every_n_train_steps=100, every_n_epochs=0, save_on_exception=True)
    module = Dies(dies=None if when == "in the update" else 3)
    with pytest.raises(RuntimeError, match="dies"):
        trainer(tmp_path, callback).fit(module, loader(), ckpt_path="last")
    assert steps(daemon, run) == ([] if when == "in the update" else [3])


def test_slurm_requeues_in_an_accumulation(daemon: RunningDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its save waits for the end of the accumulation, and the job is requeued all the same."""
    about = {"NTASKS": "1", "JOB_ID": "7", "JOB_NAME": "x", "NTASKS_PER_NODE": "1", "NODEID": "0", "PROCID": "0"}
    for name, value in {**about, "LOCALID": "0", "NODELIST": "n1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f"#!/bin/sh\necho $@ >> {tmp_path}/requeued\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    plugin = SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR2)
    fitting = trainer(tmp_path, saves(daemon, "slurm", every_n_train_steps=100), plugins=[plugin], accumulate_grad_batches=3)
    signalled = Signalled()
    signalled.at = 4
    fitting.fit(signalled, shuffled(), ckpt_path="last")
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    assert (tmp_path / "hpc_ckpt_1.ckpt").resolve().name == "step-00000002"


def test_the_exception_that_ends_a_training_is_the_one_that_is_told(daemon: RunningDaemon, tmp_path: Path) -> None:
    """OnExceptionCheckpoint saves in the middle of an accumulation, or before a resumed training has taken up its place."""
    callbacks = [saves(daemon, "told", every_n_train_steps=1), OnExceptionCheckpoint(tmp_path)]
    fitting = trainer(tmp_path, *callbacks, accumulate_grad_batches=3)
    with pytest.raises(RuntimeError, match="dies"), pytest.warns(UserWarning, match="during gradient accumulation"):
        fitting.fit(Tracing(dies=4), shuffled())

    class Early(Tracing):
        def on_fit_start(self) -> None:
            raise OSError("early")

    callbacks = [saves(daemon, "told", every_n_train_steps=1), OnExceptionCheckpoint(tmp_path)]
    with pytest.raises(OSError, match="early"):
        trainer(tmp_path, *callbacks, accumulate_grad_batches=3).fit(Early(), shuffled(), ckpt_path="last")
    assert steps(daemon, "told") == [1]


@pytest.mark.parametrize("way", ["every second epoch", "twice an epoch", "behind the epoch"])
def test_last_is_the_last_where_the_validation_saves(daemon: RunningDaemon, tmp_path: Path, way: str) -> None:
    validates: dict[str, Any] = {
        "every second epoch": {"check_val_every_n_epoch": 2},
        "twice an epoch": {"val_check_interval": 0.5},
    }
    given = {"save_on_train_epoch_end": False} if way == "behind the epoch" else {}
    callback = saves(daemon, way.replace(" ", "-"), monitor="val_loss", save_last=True, save_top_k=-1, **given)
    trainer(tmp_path, callback, max_epochs=2, **validates.get(way, {})).fit(Small(), loader(), loader(4))
    assert Path(callback.last_model_path).resolve().name == "step-00000012"


def test_the_tuner(daemon: RunningDaemon, tmp_path: Path) -> None:
    """Its own file, to which it comes back, is no checkpoint of the run; the training after it begins as without it."""

    class Rated(Small):
        lr = 0.05

    callback = saves(daemon, "tuned", every_n_train_steps=2)
    fitting = trainer(tmp_path, callback)
    found = Tuner(fitting).lr_find(module := Rated(), loader(), num_training=30, early_stop_threshold=None)
    assert found is not None and steps(daemon, "tuned") == [] and not list(tmp_path.glob(".lr*"))
    fitting.fit(module, loader(), ckpt_path="last")
    assert fitting.global_step == 6 and 6 in steps(daemon, "tuned")

    class Data(L.LightningDataModule):
        batch_size = 2

        def train_dataloader(self) -> DataLoader:
            return DataLoader(rows(), batch_size=self.batch_size)

        val_dataloader = train_dataloader

    fitting = trainer(tmp_path, saves(daemon, "scaled", every_n_train_steps=1))
    Tuner(fitting).scale_batch_size(module := Small(), datamodule=(data := Data()), max_trials=2, steps_per_trial=2)
    assert steps(daemon, "scaled") == []
    fitting.fit(module, datamodule=data, ckpt_path="last")
    assert steps(daemon, "scaled")[-1] == fitting.global_step
