"""What a HoldfastCheckpoint stores, calls, gives back and removes, in one process."""

from __future__ import annotations

import errno
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, OnExceptionCheckpoint
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

import holdfast
from holdfast.integrations.lightning import HoldfastCheckpointIO
from holdfast.integrations.lightning.contents import load_from_checkpoint
from holdfast_formats.errors import InvalidRequest, NoSuchCheckpoint
from tests.daemons import RunningDaemon, wait_until
from tests.integrations.lightning.models import Small, equal, loader, saves, steps, trainer
from tests.kit.daemons import own_daemon

daemon = own_daemon(listen="none")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("checkpoints/*.ckpt"))


def test_names_are_links_to_one_checkpoint(daemon: RunningDaemon, tmp_path: Path) -> None:
    """Two names of a step are one commit, and a name that goes lets its checkpoint go."""
    callback = saves(daemon, "names", every_n_train_steps=2, save_last=True)
    trainer(tmp_path, callback).fit(Small(), loader())
    assert names(tmp_path) == ["epoch=0-step=6.ckpt", "last.ckpt"]
    targets = {os.path.realpath(path) for path in tmp_path.glob("checkpoints/*.ckpt")}
    assert [Path(target).name for target in targets] == ["step-00000006"]
    assert callback.best_model_path.endswith("epoch=0-step=6.ckpt") and callback.last_model_path.endswith("last.ckpt")


def test_save_last_may_be_a_link(daemon: RunningDaemon, tmp_path: Path) -> None:
    callback = saves(daemon, "last-link", every_n_train_steps=4, save_last="link", save_top_k=-1)
    trainer(tmp_path, callback).fit(Small(), loader())
    assert names(tmp_path) == ["epoch=0-step=4.ckpt", "last.ckpt"]
    assert os.path.realpath(callback.last_model_path).endswith("step-00000004")


def test_the_best_are_kept_and_tested(daemon: RunningDaemon, tmp_path: Path) -> None:
    """The monitored metric is stored, and test(ckpt_path="best") takes those weights."""
    callback = saves(daemon, "best", monitor="val_loss", mode="max", save_top_k=2)
    torch.manual_seed(0)  # a loss that falls
    module, fitting = Small(), trainer(tmp_path, callback, max_epochs=4)
    fitting.fit(module, loader(), loader(4))
    assert len(names(tmp_path)) == 2 and callback.best_model_path.endswith("epoch=0-step=6.ckpt")
    with holdfast.open(os.path.realpath(callback.best_model_path)) as best:
        stored = best.read("net.weight", framework="torch")
        assert not torch.equal(stored, module.net.weight)
    found = fitting.test(module, loader(4), ckpt_path="best", verbose=False)
    assert torch.equal(module.net.weight, stored)
    assert found[0]["val_loss"] == pytest.approx(float(callback.best_model_score))


def test_older_checkpoints_go_where_nothing_names_them(daemon: RunningDaemon, tmp_path: Path) -> None:
    trainer(tmp_path, saves(daemon, "few", every_n_train_steps=1)).fit(Small(), loader())
    wait_until(lambda: steps(daemon, "few") == [6])
    trainer(tmp_path / "all", saves(daemon, "all", every_n_train_steps=2, save_top_k=-1)).fit(Small(), loader())
    assert steps(daemon, "all") == [2, 4, 6] and len(names(tmp_path / "all")) == 3


@pytest.mark.parametrize("callback", [True, False], ids=["callback", "plugin"])
def test_a_name_that_cannot_be_removed_ends_nothing(
    daemon: RunningDaemon, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, callback: bool
) -> None:
    """It is named in a warning, and keeps its checkpoint."""

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.suffix != ".ckpt":
            return own(path, missing_ok)
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    own = Path.unlink
    monkeypatch.setattr(Path, "unlink", refuse)  # the tests may run as root, to which no directory is read-only
    run = f"unremovable-{callback}"
    if callback:
        fitting = trainer(tmp_path, saves(daemon, run, every_n_train_steps=2))
    else:
        plugin = HoldfastCheckpointIO(run, at=daemon.socket, keep_last=1)
        fitting = trainer(tmp_path, ModelCheckpoint(every_n_train_steps=2), plugins=[plugin])
    fitting.fit(Small(), loader())
    assert len(names(tmp_path)) == 3 and steps(daemon, run) == [2, 4, 6]
    assert "epoch=0-step=2.ckpt, which keeps its checkpoint, cannot be removed: Operation not permitted" in caplog.text


def test_a_checkpoint_of_ones_own(daemon: RunningDaemon, tmp_path: Path) -> None:
    """trainer.save_checkpoint() in a hook and after the training; load_from_checkpoint() makes the module anew."""

    class Saves(Small):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == 3:
                self.trainer.save_checkpoint(tmp_path / "third.ckpt")
                self.third = self.weights()

    module, fitting = Saves(rate=0.125), trainer(tmp_path, saves(daemon, "own", save_top_k=0))
    fitting.fit(module, loader())
    fitting.save_checkpoint(tmp_path / "end.ckpt")
    fitting.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert steps(daemon, "own") == [3, 6]
    again = load_from_checkpoint(Small, tmp_path / "third.ckpt")
    assert equal(again.weights(), module.third) and again.hparams["rate"] == 0.125
    assert equal(load_from_checkpoint(Small, tmp_path / "weights.ckpt", rate=0.5).weights(), module.weights())
    assert load_from_checkpoint(Small, tmp_path / "end.ckpt", rate=0.5).hparams["rate"] == 0.5


def test_weights_alone_are_no_training(daemon: RunningDaemon, tmp_path: Path) -> None:
    callback = saves(daemon, "weights", every_n_epochs=1, save_weights_only=True)
    trainer(tmp_path, callback).fit(Small(), loader())
    with holdfast.open(os.path.realpath(callback.best_model_path)) as stored:
        assert "optim" not in stored.groups
    other = Small()
    trainer(tmp_path, saves(daemon, "weights")).validate(other, loader(), ckpt_path=callback.best_model_path, verbose=False)
    assert equal(other.weights(), load_from_checkpoint(Small, callback.best_model_path).weights())
    with pytest.raises(KeyError, match="contains only the model"):
        trainer(tmp_path, saves(daemon, "weights"), max_epochs=2).fit(Small(), loader(), ckpt_path=callback.best_model_path)


@pytest.mark.parametrize("later", [False, True], ids=["same training", "a later start"])
def test_weights_beside_everything(daemon: RunningDaemon, tmp_path: Path, later: bool) -> None:
    """Weights asked for at a step that was saved whole are another name of it: its optimizer stays."""
    run = f"beside-{later}"
    callback = saves(daemon, run, every_n_train_steps=2)
    fitting = trainer(tmp_path, callback)
    fitting.fit(Small(), loader())
    if later:
        fitting = trainer(tmp_path, saves(daemon, run, every_n_train_steps=2))
        fitting.fit(Small(), loader(), ckpt_path="last")
    fitting.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert (tmp_path / "weights.ckpt").resolve() == (daemon.root / run / "checkpoints" / "step-00000006").resolve()
    trainer(tmp_path, saves(daemon, run), max_epochs=2).fit(Small(), loader(), ckpt_path="last")
    assert 12 in steps(daemon, run)


def test_a_new_training_needs_a_new_run(daemon: RunningDaemon, tmp_path: Path) -> None:
    """fit() without ckpt_path goes on in the same Trainer, and is refused where it would leave checkpoints behind."""
    fitting, module = trainer(tmp_path, saves(daemon, "twice", every_n_train_steps=3)), Small()
    fitting.fit(module, loader())
    fitting.fit_loop.max_epochs = 2
    fitting.fit(module, loader())
    assert fitting.global_step == 12 and steps(daemon, "twice")[-1] == 12
    with pytest.raises(InvalidRequest, match="checkpoints up to step 12"):
        trainer(tmp_path, saves(daemon, "twice")).fit(Small(), loader())


def test_last_is_the_beginning_where_there_is_nothing(daemon: RunningDaemon, tmp_path: Path) -> None:
    fitting = trainer(tmp_path, saves(daemon, "nothing"))
    fitting.fit(Small(), loader(), ckpt_path="last")
    assert fitting.global_step == 6
    with pytest.raises(NoSuchCheckpoint, match="has no checkpoint"):
        trainer(tmp_path, saves(daemon, "nothing-else")).validate(Small(), loader(), ckpt_path="last")


@pytest.mark.parametrize("how", ["number", "text", "name"])
def test_an_older_step(daemon: RunningDaemon, tmp_path: Path, how: str) -> None:
    """Training goes on from the step that is named, and what came after it is saved anew."""
    run = f"older-{how}"
    first = Small()
    trainer(tmp_path, saves(daemon, run, every_n_train_steps=2, save_top_k=-1)).fit(first, loader())
    named: Any = {"number": 4, "text": "4", "name": tmp_path / "checkpoints" / "epoch=0-step=4.ckpt"}[how]
    seen: list[int] = []

    class Seen(Small):
        def on_train_batch_start(self, *_: Any) -> None:
            seen.append(self.global_step)

    again = Seen()
    trainer(tmp_path, saves(daemon, run, every_n_train_steps=2, save_top_k=-1)).fit(again, loader(), ckpt_path=named)
    assert seen == [4, 5] and equal(again.weights(), first.weights())
    assert steps(daemon, run) == [2, 4, 6]


def test_lightnings_own_files(daemon: RunningDaemon, tmp_path: Path) -> None:
    """A run moves over by loading the old file once; a file of another run's is no checkpoint of this one."""
    old = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=4, save_last=True)
    trainer(tmp_path, old).fit(Small(), loader())
    file = tmp_path / "checkpoints" / "last.ckpt"
    before = file.read_bytes()
    callback = saves(daemon, "moved", every_n_train_steps=1, save_last=True)
    fitting = trainer(tmp_path, callback)
    fitting.fit(Small(), loader(), ckpt_path=file)
    assert fitting.global_step == 6 and steps(daemon, "moved")[-1] == 6
    assert file.read_bytes() == before and os.path.islink(callback.last_model_path)
    with pytest.raises(InvalidRequest, match="a run or root other than"):
        trainer(tmp_path, saves(daemon, "other")).fit(Small(), loader(), ckpt_path=callback.last_model_path)


def test_an_exception_waits_for_saves(daemon: RunningDaemon, tmp_path: Path) -> None:
    """What was saved before it is committed; save_on_exception saves the last whole step."""

    class Fails(Small):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.global_step == 5:
                raise RuntimeError("out of luck")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="out of luck"):
        trainer(tmp_path, saves(daemon, "fails", every_n_train_steps=2)).fit(Fails(), loader())
    assert 4 in steps(daemon, "fails")
    callback = saves(daemon, "fails-saved", every_n_train_steps=2, save_on_exception=True)
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer(tmp_path, callback).fit(Fails(), loader())
    assert steps(daemon, "fails-saved")[-1] == 5
    torch.manual_seed(3)
    whole, again = Small(), Small()
    again.load_state_dict(whole.state_dict())
    trainer(tmp_path / "w", saves(daemon, "whole", save_top_k=0)).fit(whole, loader())
    failing = Fails()
    failing.load_state_dict(again.state_dict())
    also = OnExceptionCheckpoint(tmp_path / "e")
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer(tmp_path / "e", saves(daemon, "half", save_top_k=0), also).fit(failing, loader())
    trainer(tmp_path / "e", saves(daemon, "half", save_top_k=0), also).fit(again, loader(), ckpt_path=also.ckpt_path)
    assert equal(again.weights(), whole.weights()) and not os.path.lexists(also.ckpt_path)


def test_gradients_in_the_making_are_not_saved(daemon: RunningDaemon, tmp_path: Path) -> None:
    """A time that comes in the middle of an accumulation is kept until it is complete; a save by hand is refused."""

    class Saves(Small):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                with pytest.raises(InvalidRequest, match="gradient accumulation"):
                    self.trainer.save_checkpoint(tmp_path / "half.ckpt")

    callback = saves(daemon, "times", train_time_interval=timedelta(0), save_top_k=-1)
    trainer(tmp_path, callback, accumulate_grad_batches=3).fit(Saves(), loader())
    assert steps(daemon, "times") == [1, 2]


def test_a_hugging_face_model(daemon: RunningDaemon, tmp_path: Path) -> None:
    """weights= stores the model under its own names, beside its config; the rest of the module is there too."""

    class Language(Small):
        def __init__(self) -> None:
            super().__init__()
            self.lm = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=8, vocab_size=32))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.lm(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss + self.net(batch[0]).mean()

    module = Language()
    trainer(tmp_path, callback := saves(daemon, "lm", weights="lm", save_last=True)).fit(module, loader())
    loaded = GPT2LMHeadModel.from_pretrained(callback.last_model_path)
    assert equal(dict(loaded.state_dict()), dict(module.lm.state_dict()))
    assert "transformer.wte.weight" in load_file(
        next(Path(os.path.realpath(callback.last_model_path)).glob("model*.safetensors"))
    )
    again = Language()
    trainer(tmp_path, saves(daemon, "lm", weights="lm"), max_epochs=2).fit(again, loader(), ckpt_path="last")
    assert equal(load_from_checkpoint(Language, callback.last_model_path).weights(), module.weights())
    with pytest.raises(InvalidRequest, match="no such module"):
        trainer(tmp_path, saves(daemon, "no-lm", weights="model")).fit(Language(), loader())


def test_averaged_weights(daemon: RunningDaemon, tmp_path: Path) -> None:
    """The average is the group `ema`, and what a test or load_from_checkpoint() takes, as with Lightning."""
    callback = saves(daemon, "ema", every_n_train_steps=3, save_top_k=-1)
    trained, average = Small(), EMAWeightAveraging(decay=0.5)
    trainer(tmp_path, callback, average).fit(trained, loader())
    place = daemon.root / "ema" / "checkpoints" / "step-00000003"
    with holdfast.open(place) as stored:
        kept = {name: stored.read(name, group="ema", framework="torch") for name in trained.weights()}
        assert not torch.equal(kept["net.weight"], stored.read("net.weight", framework="torch"))
    assert equal(load_from_checkpoint(Small, place).weights(), kept)
    tested = Small()
    trainer(tmp_path, saves(daemon, "ema")).test(tested, loader(), ckpt_path=3, verbose=False)
    assert equal(tested.weights(), kept)
    again = Small()
    trainer(tmp_path, saves(daemon, "ema"), EMAWeightAveraging(decay=0.5)).fit(again, loader(), ckpt_path=3)
    assert equal(again.weights(), trained.weights())


def test_hooks_keep_values_and_tensors(daemon: RunningDaemon, tmp_path: Path) -> None:
    """What on_save_checkpoint adds comes back, with its tensors, and so does what a callback and a data module keep."""

    class Data(L.LightningDataModule):
        seen = 0

        def train_dataloader(self) -> Any:
            return loader()

        def state_dict(self) -> dict[str, Any]:
            return {"seen": 7}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen = state["seen"]

    class Keeps(Small):
        found: Any = None

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = {1: torch.arange(3), "pair": (2, "b")}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.found = checkpoint["mine"]
            assert equal(checkpoint["state_dict"], self.weights())  # restored already

    trainer(tmp_path, saves(daemon, "hooks", every_n_train_steps=2)).fit(Keeps(), datamodule=Data())
    again, data = Keeps(), Data()
    trainer(tmp_path, saves(daemon, "hooks"), max_epochs=2).fit(again, datamodule=data, ckpt_path="last")
    assert torch.equal(again.found[1], torch.arange(3)) and again.found["pair"] == (2, "b") and data.seen == 7


def test_a_hook_that_changes_weights_is_heard(daemon: RunningDaemon, tmp_path: Path) -> None:
    class Zeros(Small):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"] = {name: torch.zeros_like(value) for name, value in checkpoint["state_dict"].items()}

    trainer(tmp_path, saves(daemon, "zeros")).fit(Small(), loader())
    module = Zeros()
    trainer(tmp_path, saves(daemon, "zeros")).validate(module, loader(), ckpt_path="last", verbose=False)
    assert not any(value.any() for value in module.weights().values())


def test_a_damaged_optimizer_gives_way_to_the_step_before(daemon: RunningDaemon, tmp_path: Path) -> None:
    """The weights of the newest step are in the model already: all of the older one takes their place."""
    callback = saves(daemon, "damaged", every_n_train_steps=2, save_top_k=-1)
    first = Small()
    trainer(tmp_path, callback, max_epochs=2).fit(first, loader())
    for file in (daemon.root / "damaged" / "checkpoints" / "step-00000012").glob("optim*.safetensors"):
        content = bytearray(file.read_bytes())
        content[-8:] = bytes(8 * [255])
        file.chmod(0o644)
        file.write_bytes(content)
    seen: list[int] = []

    class Seen(Small):
        def on_train_batch_start(self, *_: Any) -> None:
            seen.append(self.global_step)

    again = Seen()
    trainer(tmp_path, saves(daemon, "damaged", save_top_k=0), max_epochs=2).fit(again, loader(), ckpt_path="last")
    assert seen == [10, 11] and equal(again.weights(), first.weights())
