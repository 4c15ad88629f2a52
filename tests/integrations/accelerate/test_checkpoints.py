"""What an attached Accelerator stores, takes back, and refuses by name (E2, E3, E4)."""

from __future__ import annotations

import gc
import json
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast import Checkpointer
from holdfast.integrations import loader_positions
from holdfast.integrations.accelerate import AcceleratorCheckpoints, attach
from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest, NoSuchCheckpoint
from tests.daemons import RunningDaemon
from tests.kit.daemons import own_daemon

daemon = own_daemon(listen="none")


class Config:
    """What a transformers config can."""

    def save_pretrained(self, directory: str) -> None:
        Path(directory, "config.json").write_text(json.dumps({"width": 4}))


class Counter:
    """An object that scripts register."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Training:
    """A model, its optimizer, a scheduler and two loaders, prepared; `run` is attached."""

    def __init__(self, daemon: RunningDaemon, run: str, seed: int, **options: Any) -> None:
        torch.manual_seed(seed)
        project = options.pop("project", None)
        config = DataLoaderConfiguration(use_stateful_dataloader=options.pop("stateful", False))
        self.accelerator = Accelerator(
            cpu=True,
            project_config=project,
            dataloader_config=config,
            gradient_accumulation_steps=options.pop("accumulate", 1),
        )
        model = nn.Linear(4, 2)
        model.config = Config()  # type: ignore[assignment]
        self.counter = Counter()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.arange(12)), batch_size=2, shuffle=True)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self.accelerator.register_for_checkpointing(self.counter)
        self.holdfast: AcceleratorCheckpoints = attach(self.accelerator, run, at=daemon.socket, **options)

    def step(self) -> None:
        self.counter.count += 1
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(torch.ones(3, 4)).square().sum())
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def everything(self) -> list[Any]:
        found = [value.clone() for value in self.model.state_dict().values()]
        kept = [self.optimizer.optimizer.state[one] for one in self.model.parameters()]
        found += [state[key].clone() for state in kept for key in sorted(state)]
        return [tensor.tolist() for tensor in found] + [self.counter.count, self.scheduler.get_last_lr()]


def test_everything_that_is_prepared_or_registered_comes_back(daemon: RunningDaemon, tmp_path: Path) -> None:
    """Under the directory that was given there is a link, and whatever leads there is restored."""
    one = Training(daemon, "whole", 1)
    assert one.accelerator.load_state() == 0
    for _ in range(3):
        one.step()
    assert one.accelerator.save_state(tmp_path / "out" / "step_3") == tmp_path / "out" / "step_3"
    expected = one.everything()
    one.step()
    one.accelerator.save_state(tmp_path / "out" / "step_4", metrics={"loss": 0.5})
    one.holdfast.close()
    assert os.readlink(tmp_path / "out" / "step_3") == str(daemon.root / naming.checkpoint_path("whole", 3))
    assert (tmp_path / "out" / "step_3" / "config.json").is_file()

    other = Training(daemon, "whole", 2)
    for place in (tmp_path / "out" / "step_3", str(daemon.root / naming.checkpoint_path("whole", 3)), 3):
        assert other.accelerator.load_state(place) == 3
        assert other.everything() == expected and other.holdfast.optimizer_steps == 3
    assert other.accelerator.load_state() == 4 and other.everything() != expected
    other.holdfast.close()


def test_free_memory_releases_what_was_prepared(daemon: RunningDaemon) -> None:
    """The save is seen through, nothing keeps the model, and another training attaches the same accelerator."""
    one = Training(daemon, "freed", 5)
    accelerator, own = one.accelerator, type(one.accelerator).save_state
    one.step()
    accelerator.save_state()
    kept = [weakref.ref(part) for part in (one.model, one.model.weight, one.optimizer.optimizer)]
    ticket = one.holdfast.ticket
    vars(one).clear()
    accelerator.free_memory()
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3
    assert ticket is not None and ticket.done and accelerator.save_state.__func__ is own
    accelerator.prepare(nn.Linear(4, 2))
    again = attach(accelerator, "freed-again", at=daemon.socket)
    accelerator.save_state(step=1, wait="durable")
    accelerator.end_training()
    assert again.checkpointer.run == "freed-again"


def test_a_plain_checkpointer_reads_it(daemon: RunningDaemon) -> None:
    """The names are the model's own: a script without accelerate goes on from it (E2)."""
    one = Training(daemon, "plain", 3)
    one.step()
    one.accelerator.save_state(wait="durable")
    one.holdfast.close()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    with Checkpointer("plain", {"model": model, "optim": optimizer}, at=daemon.socket) as checkpointer:
        assert checkpointer.restore(groups=("model", "optim")) == 1
    assert model.weight.tolist() == one.model.weight.tolist()
    assert (
        optimizer.state[model.weight]["exp_avg"].tolist()
        == next(iter(one.optimizer.optimizer.state.values()))["exp_avg"].tolist()
    )


def test_a_rollback_goes_on_with_a_line_of_its_own(daemon: RunningDaemon) -> None:
    """Steps that were saved before are saved anew, whatever stands there."""
    one = Training(daemon, "back", 4)
    for _ in range(4):
        one.step()
        one.accelerator.save_state()
    assert one.accelerator.load_state(2) == 2
    one.counter.count = 100
    for _ in range(2):
        one.step()
        one.accelerator.save_state(wait="durable")
    assert one.accelerator.load_state() == 4 and one.counter.count == 102
    one.holdfast.close()


def test_the_same_step_is_saved_anew(daemon: RunningDaemon, tmp_path: Path) -> None:
    """At the end of an epoch scripts save what they have just saved, after the scheduler of epochs has stepped."""
    one = Training(daemon, "twice", 5)
    one.step()
    one.accelerator.save_state(tmp_path / "step_1")
    one.counter.count = 7
    one.accelerator.save_state(tmp_path / "epoch_0")
    one.counter.count = 0
    assert one.accelerator.load_state(tmp_path / "step_1") == 1 and one.counter.count == 7
    one.holdfast.close()


def test_automatic_names_and_their_limit(daemon: RunningDaemon, tmp_path: Path) -> None:
    """The newest are kept, by links and in the run; numbers go on after a restart."""
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    one = Training(daemon, "named", 6, project=project)
    for _ in range(4):
        one.step()
        one.accelerator.save_state(wait="durable")
    one.holdfast.close()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_2", "checkpoint_3"]
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    other = Training(daemon, "named", 7, project=project)
    assert other.accelerator.load_state() == 4 and other.accelerator.save_iteration == 4
    other.holdfast.close()


def test_what_accelerate_wrote_itself_is_loaded_by_it(daemon: RunningDaemon, tmp_path: Path) -> None:
    """A run moves over: the first start loads the old directory, and saves go to Holdfast from then on."""
    one = Training(daemon, "before", 8)
    one.step()
    expected = one.everything()
    one.holdfast._own["save_state"](tmp_path / "old")
    one.holdfast.close()
    other = Training(daemon, "after", 9)
    assert other.accelerator.load_state(tmp_path / "old") is None
    assert other.everything() == expected
    other.holdfast.close()


def test_what_it_does_not_understand_is_refused_by_name(daemon: RunningDaemon, tmp_path: Path) -> None:
    """Before anything is staged."""
    with pytest.raises(InvalidRequest, match="no model yet"):
        attach(Accelerator(cpu=True), "refused", at=daemon.socket)
    one = Training(daemon, "refused", 10, accumulate=2)
    with pytest.raises(InvalidRequest, match="attached already"):
        attach(one.accelerator, "again", at=daemon.socket)
    one.step()
    with pytest.raises(InvalidRequest, match="accumulation"):
        one.accelerator.save_state(tmp_path / "middle")
    one.step()
    with pytest.raises(InvalidRequest, match="exclude_frozen_parameters"):
        one.accelerator.save_state(tmp_path / "arguments", exclude_frozen_parameters=True)
    handle = one.accelerator.register_save_state_pre_hook(lambda models, weights, directory: None)
    with pytest.raises(InvalidRequest, match="register_save_state_pre_hook"):
        one.accelerator.save_state(tmp_path / "hooks")
    handle.remove()
    assert not list(tmp_path.iterdir())
    (tmp_path / "there").mkdir()
    one.accelerator.save_state(tmp_path / "there", wait="durable")  # training goes on, without the link
    assert not (tmp_path / "there").is_symlink()
    with pytest.raises(NoSuchCheckpoint):
        one.accelerator.load_state(99)
    with pytest.raises(ValueError, match="does not exist"):
        one.accelerator.load_state(tmp_path / "nothing")
    other = Training(daemon, "another", 11)
    other.step()
    other.accelerator.save_state(tmp_path / "other", wait="durable")
    with pytest.raises(InvalidRequest, match="a run or root other than"):
        one.accelerator.load_state(tmp_path / "other")
    one.accelerator._dataloaders.append(DataLoader(TensorDataset(torch.arange(4))))
    with pytest.raises(InvalidRequest, match="was not prepared by a known version of accelerate"):
        one.accelerator.save_state(tmp_path / "loader")
    for training in (one, other):
        training.holdfast.close()


def test_a_stateful_loader_is_not_skipped_twice(daemon: RunningDaemon) -> None:
    """It goes on by itself; to skip what it has left out already loses rows."""
    one = Training(daemon, "stateful", 12, stateful=True)
    with pytest.raises(InvalidRequest, match="continues where it was"):
        one.accelerator.skip_first_batches(one.loader, 2)
    assert isinstance(one.holdfast._loaders[0], loader_positions.LoaderPosition)
    one.holdfast.close()
