"""What an attached Trainer resumes from, keeps, writes down and refuses."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import holdfast
from holdfast import Api
from holdfast.integrations.trainers import resuming
from holdfast.integrations.transformers import HoldfastTrainerMixin, attach, framework
from holdfast.stage.slots import Slot
from holdfast_formats import naming
from holdfast_formats.errors import AlreadyCommitted, InvalidRequest, NoSpace, NoSuchCheckpoint, StateMismatch
from tests.daemons import RunningDaemon, wait_until, wait_until_read_back
from tests.integrations.transformers.models import Sentences, small_model
from tests.kit.daemons import own_daemon

_runs = itertools.count()


daemon = own_daemon()


@pytest.fixture
def run() -> str:
    return f"run-{next(_runs)}"


def plain(output: Path, kind: type[Trainer] = Trainer, callbacks: Any = None, **changed: Any) -> Trainer:
    """A Trainer of six steps that saves every second one."""
    settings: dict[str, Any] = {
        "output_dir": str(output),
        "max_steps": 6,
        "save_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "remove_unused_columns": False,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
    }
    arguments = Seq2SeqTrainingArguments if kind is Seq2SeqTrainer else TrainingArguments
    data = [{name: value for name, value in row.items() if name != "row"} for row in (Sentences()[i] for i in range(12))]
    made = settings | changed
    evaluated = data[:4] if made.get("eval_strategy") else None
    return kind(small_model(), arguments(**made), train_dataset=data, eval_dataset=evaluated, callbacks=callbacks)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


class Starts(TrainerCallback):
    """The step from which each training begins."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)


@pytest.mark.filterwarnings("error::holdfast.LeftOutWarning")
def test_a_script_that_is_started_again_goes_on(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    first = attach(plain(tmp_path, max_steps=4, num_train_epochs=1), run, at=daemon.socket)
    first.train()
    starts = Starts()
    second = attach(plain(tmp_path, callbacks=[starts]), run, at=daemon.socket)
    second.train()
    assert starts.steps == [4] and second.state.global_step == 6
    assert [entry["step"] for entry in second.state.log_history if "loss" in entry] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(InvalidRequest, match=f"has already trained the run {run}"):
        second.train()
    second.train(resume_from_checkpoint=True)
    assert starts.steps == [4, 6]


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_a_run_that_has_ended_stays_as_it_is(daemon: RunningDaemon, run: str, tmp_path: Path, strategy: str) -> None:
    """Started again in the middle of its last epoch, transformers' loop would train one more step, at every start."""
    settings = {"max_steps": 5, "save_steps": 5, "save_strategy": strategy}  # of 6 steps an epoch
    first = attach(plain(tmp_path, **settings), run, at=daemon.socket)
    first.train()
    for _ in range(2):
        again = attach(plain(tmp_path, **settings), run, at=daemon.socket)
        again.train()
        assert again.state.global_step == 5
        assert_same(weights(first), weights(again))


def test_what_can_be_resumed_from(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    whole = attach(plain(tmp_path), run, at=daemon.socket)
    whole.train()
    wait_until_read_back(daemon, run, 6)
    for asked, step in ((2, 2), ("4", 4), (tmp_path / "checkpoint-2", 2), ("latest-healthy", 6), (True, 6), ("auto", 6)):
        starts = Starts()
        other = attach(plain(tmp_path, callbacks=[starts], save_strategy="no"), run, at=daemon.socket)
        other.train(resume_from_checkpoint=asked)
        assert starts.steps == [step], asked
        assert_same(weights(whole), weights(other))


def test_going_back_leaves_behind_what_was_newer(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    attach(plain(tmp_path), run, at=daemon.socket).train()
    again = attach(plain(tmp_path, max_steps=4), run, at=daemon.socket)
    again.train(resume_from_checkpoint=2)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    starts = Starts()
    attach(plain(tmp_path, callbacks=[starts]), run, at=daemon.socket).train()
    assert starts.steps == [4]


def test_a_new_start_replaces_the_run(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    attach(plain(tmp_path), run, at=daemon.socket).train()
    starts = Starts()
    fresh = attach(plain(tmp_path, callbacks=[starts], max_steps=4), run, at=daemon.socket)
    fresh.train(resume_from_checkpoint=False)
    assert starts.steps == [0]
    with holdfast.open(f"{run}@latest", root=daemon.root) as newest:
        assert newest.step == 4


def test_what_a_damaged_checkpoint_costs(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    """The training starts from the sound one before it, with that one's TrainerState; a step by number is refused."""
    whole = attach(plain(tmp_path), run, at=daemon.socket)
    whole.train()
    wait_until_read_back(daemon, run, 6)
    file = daemon.root / naming.checkpoint_path(run, 6) / "model.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-3] ^= 1
    file.write_bytes(damaged)
    starts = Starts()
    other = attach(plain(tmp_path, callbacks=[starts], save_strategy="no"), run, at=daemon.socket)
    other.train()
    assert starts.steps == [4]
    assert_same(weights(whole), weights(other))


def test_a_run_without_checkpoints(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    with pytest.raises(NoSuchCheckpoint, match=f"none in the run {run}"):
        attach(plain(tmp_path), run, at=daemon.socket).train(resume_from_checkpoint=True)
    with pytest.raises(NoSuchCheckpoint):
        attach(plain(tmp_path), run, at=daemon.socket).train(resume_from_checkpoint=500)


@pytest.mark.parametrize("explicit", [True, False])
def test_a_run_moves_over(daemon: RunningDaemon, run: str, tmp_path: Path, explicit: bool) -> None:
    """Checkpoints that transformers wrote are resumed from by transformers, and everything after that is Holdfast's."""
    before = plain(tmp_path, max_steps=6)
    before.train()
    end = weights(before)
    for newer in ("checkpoint-4", "checkpoint-6"):
        (tmp_path / newer).rename(tmp_path / f"old-{newer}")
    starts = Starts()
    moved = attach(plain(tmp_path, callbacks=[starts]), run, at=daemon.socket)
    moved.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2") if explicit else True)
    assert starts.steps == [2]
    assert_same(end, weights(moved))
    assert not (tmp_path / "checkpoint-2").is_symlink() and (tmp_path / "checkpoint-6").is_symlink()
    attach(plain(tmp_path, callbacks=[starts], max_steps=8), run, at=daemon.socket).train(resume_from_checkpoint=True)
    assert starts.steps == [2, 6]


def test_a_run_that_went_on_without_holdfast(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    """What transformers has saved since is resumed from, and the run goes on above its own checkpoints, which stay."""
    attach(plain(tmp_path, max_steps=2), run, at=daemon.socket).train()
    plain(tmp_path / "apart", max_steps=4).train()
    (tmp_path / "apart" / "checkpoint-4").rename(tmp_path / "checkpoint-4")
    starts = Starts()
    attach(plain(tmp_path, callbacks=[starts]), run, at=daemon.socket).train(resume_from_checkpoint=True)
    assert starts.steps == [4]
    with Api(daemon.url) as api:
        assert sorted(made.step for made in api.checkpoints(run) if made.state != "abandoned") == [2, 6]


def test_the_directory_is_a_model(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    trainer = attach(plain(tmp_path), run, at=daemon.socket)
    trainer.train()
    path = tmp_path / "checkpoint-6"
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert_same(weights(trainer), loaded.state_dict())
    assert json.loads((path / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    assert json.loads((path / "training_args.json").read_text())["max_steps"] == 6
    assert json.loads((path / "trainer_state.json").read_text())["global_step"] == 6
    with holdfast.open(path) as checkpoint:
        metrics = checkpoint.manifest.metrics
    assert metrics["loss"] == trainer.state.log_history[-2]["loss"]


def test_save_total_limit(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    """The newest two keep their links, and what has none is removed."""
    trainer = attach(plain(tmp_path, save_steps=1, save_total_limit=2), run, at=daemon.socket)
    trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-5", "checkpoint-6"]
    checkpoints = daemon.root / run / naming.CHECKPOINTS
    wait_until(lambda: sorted(path.name for path in checkpoints.iterdir()) == ["step-00000005", "step-00000006"])


def test_the_best_model_is_kept_and_loaded(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    """With a metric that only gets worse, the best is the first."""
    seen: dict[int, dict[str, torch.Tensor]] = {}

    class Worse(Trainer):
        def evaluate(self, *arguments: Any, **named: Any) -> dict[str, float]:
            found = super().evaluate(*arguments, **named)
            seen[self.state.global_step] = weights(self)
            return {**found, "eval_worse": float(self.state.global_step)}

    best = {"load_best_model_at_end": True, "metric_for_best_model": "worse", "greater_is_better": False}
    settings = best | {"eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 1}
    trainer = attach(plain(tmp_path, Worse, **settings), run, at=daemon.socket)
    trainer.train()
    assert trainer.state.best_global_step == 2
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert_same(weights(trainer), seen[2])
    assert not torch.equal(seen[2]["lm_head.weight"], seen[6]["lm_head.weight"])
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def test_saving_when_it_is_best(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "best", "metric_for_best_model": "loss"}
    trainer = attach(plain(tmp_path, **settings), run, at=daemon.socket)
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    better = [step for step, loss in zip((2, 4, 6), losses, strict=True) if loss == min(losses[: step // 2])]
    assert [step for step in (2, 4, 6) if (tmp_path / f"checkpoint-{step}" / naming.COMMIT).is_file()] == better


def test_a_callback_that_reads_the_directory_finds_it_complete(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    found = []

    class Uploads(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            found.append((Path(args.output_dir) / f"checkpoint-{state.global_step}" / naming.COMMIT).is_file())

    attach(plain(tmp_path, callbacks=[Uploads()]), run, at=daemon.socket).train()
    assert found == [True, True, True]


def test_a_save_that_fails_does_not_end_the_training(
    daemon: RunningDaemon, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where a callback waits for its files, as on a full disk: that step has none, and the others are saved."""
    seal, found = Slot.seal, []

    class Uploads(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            found.append((Path(args.output_dir) / f"checkpoint-{state.global_step}" / naming.COMMIT).is_file())

    def sealed(slot: Slot, *given: Any) -> str:
        if trainer.state.global_step == 4:
            raise NoSpace("there is no space left")
        return seal(slot, *given)

    monkeypatch.setattr(Slot, "seal", sealed)
    settings = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    settings |= {"metric_for_best_model": "loss", "greater_is_better": False}
    trainer = attach(plain(tmp_path, callbacks=[Uploads()], **settings), run, at=daemon.socket)
    monkeypatch.setattr(trainer, "evaluate", lambda *given, **named: {"eval_loss": abs(4 - trainer.state.global_step)})
    trainer.train()  # the best step is the one without a checkpoint
    assert (trainer.state.global_step, found) == (6, [True, False, True])
    assert "step 4 was not saved, so callbacks find no files of it: there is no space left" in caplog.text


def test_no_save_of_a_plain_trainer_waits_for_its_commit(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    """It did, for the callback that `attach` itself adds."""
    seen: list[bool] = []

    class Looks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(any(framework.reads_files(one) for one in trainer.callback_handler.callbacks))

    trainer = attach(plain(tmp_path, callbacks=[Looks()]), run, at=daemon.socket)
    trainer.train()
    assert seen == [False] * 6


def test_callbacks_that_read_no_files_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B's uploads a checkpoint only if it is told to; a callback without on_save reads none; others may."""
    from transformers.integrations import FlyteCallback, WandbCallback

    monkeypatch.delenv("WANDB_LOG_MODEL", raising=False)
    callbacks = [kind.__new__(kind) for kind in (WandbCallback, Starts, FlyteCallback)]
    assert [framework.reads_files(callback) for callback in callbacks] == [False, False, True]
    monkeypatch.setenv("WANDB_LOG_MODEL", "checkpoint")
    assert framework.reads_files(callbacks[0])


def test_a_model_that_is_none_of_transformers(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    class Line(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(2))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": ((self.weight[0] * x + self.weight[1] - labels) ** 2).mean()}

    def made(steps: int) -> Trainer:
        settings = {"max_steps": steps, "save_steps": 2, "use_cpu": True, "report_to": "none", "disable_tqdm": True}
        data = [{"x": torch.tensor(float(i)), "labels": torch.tensor(2.0 * i + 1)} for i in range(16)]
        return Trainer(Line(), TrainingArguments(str(tmp_path), **settings), train_dataset=data)

    whole = attach(made(4), run, at=daemon.socket)
    whole.train()
    other = attach(made(4), run, at=daemon.socket)
    other.train(resume_from_checkpoint=2)
    assert_same(weights(whole), weights(other))
    assert not (tmp_path / "checkpoint-4" / "config.json").exists()


def test_states_of_callbacks_return(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss", "load_best_model_at_end": True}
    settings |= {"learning_rate": 0.0, "save_steps": 1, "restore_callback_states_from_checkpoint": True}
    first = attach(plain(tmp_path, callbacks=[EarlyStoppingCallback(4)], max_steps=3, **settings), run, at=daemon.socket)
    first.train()
    second = attach(plain(tmp_path, callbacks=[EarlyStoppingCallback(4)], max_steps=9, **settings), run, at=daemon.socket)
    second.train()
    assert second.state.global_step == 5  # nothing got better after the first step: two evaluations before, two after


def test_losses_that_are_not_numbers_and_a_scheduler_with_infinities(
    daemon: RunningDaemon, run: str, tmp_path: Path
) -> None:
    class Bad(Trainer):
        def compute_loss(self, *arguments: Any, **named: Any) -> Any:
            loss = super().compute_loss(*arguments, **named)
            return loss * (float("nan") if self.state.global_step == 1 else 1)

    settings = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 2}
    settings |= {"metric_for_best_model": "loss", "logging_nan_inf_filter": False, "max_grad_norm": 0}
    attach(plain(tmp_path, Bad, max_steps=2, **settings), run, at=daemon.socket).train()
    starts = Starts()
    attach(plain(tmp_path, Bad, callbacks=[starts], max_steps=4, **settings), run, at=daemon.socket).train()
    assert starts.steps == [2]


def test_the_weights_alone_cannot_be_resumed_from(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    attach(plain(tmp_path, save_only_model=True), run, at=daemon.socket).train()
    assert_same(weights(plain(tmp_path)), weights(plain(tmp_path)))
    with holdfast.open(tmp_path / "checkpoint-6") as checkpoint:
        assert checkpoint.groups == ("model",)
    with pytest.raises(StateMismatch):
        attach(plain(tmp_path), run, at=daemon.socket).train()


def test_a_checkpoint_of_a_preempted_job(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    """transformers 5 saves on SIGTERM, also in the middle of a step: the step is made once more, with the same numbers."""
    probe = TrainingArguments.__dataclass_fields__
    if "enable_jit_checkpoint" not in probe:
        pytest.skip("this transformers has no JIT checkpoints")
    whole = attach(plain(tmp_path / "whole"), f"{run}-whole", at=daemon.socket)
    whole.train()

    class Preempted(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                found = next(one for one in trainer.callback_handler.callbacks if hasattr(one, "jit_manager"))
                found.jit_manager.is_checkpoint_requested = True

    settings = {"save_strategy": "no", "enable_jit_checkpoint": True}
    trainer = attach(plain(tmp_path / "cut", callbacks=[Preempted()], **settings), run, at=daemon.socket)
    trainer.train()
    assert [path.name for path in (tmp_path / "cut").glob("checkpoint-*")] == ["checkpoint-3"]
    starts = Starts()
    other = attach(plain(tmp_path / "cut", callbacks=[starts]), run, at=daemon.socket)
    other.train()
    assert starts.steps == [3]
    assert_same(weights(whole), weights(other))


def test_other_trainers(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    """Seq2SeqTrainer, subclasses that override a method and call super(), and those that have the mixin."""
    calls = []

    class Own(Seq2SeqTrainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            calls.append(self.state.global_step)
            super()._save_checkpoint(model, trial)

    class Mixed(HoldfastTrainerMixin, Seq2SeqTrainer):
        pass

    for kind in (Own, Mixed):
        data = [{name: value for name, value in Sentences()[i].items() if name != "row"} for i in range(12)]
        arguments = Seq2SeqTrainingArguments(str(tmp_path / kind.__name__), max_steps=2, save_steps=2, use_cpu=True)
        arguments.report_to = []
        trainer = attach(kind(small_model(), arguments, train_dataset=data), f"{run}-{kind.__name__}", at=daemon.socket)
        trainer.train()
        assert (tmp_path / kind.__name__ / "checkpoint-2" / naming.COMMIT).is_file()
    assert calls == [2]
    with pytest.raises(InvalidRequest, match="is attached to no run"):
        Mixed(small_model(), arguments, train_dataset=data).train()


def test_a_method_that_keeps_the_save_to_itself(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    class Deaf(Trainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            pass

    with pytest.raises(InvalidRequest, match=r"Deaf._save_checkpoint\(\) does not call super\(\): step 2 was not saved"):
        attach(plain(tmp_path, Deaf), run, at=daemon.socket).train()


@pytest.mark.parametrize("name", ["_save_optimizer_and_scheduler", "_save_rng_state", "_save", "save_model"])
def test_methods_that_nobody_would_call(tmp_path: Path, name: str) -> None:
    """What a subclass saves beside the rest would be missing, and nobody would know before it resumes."""
    special = type("Special", (Trainer,), {name: lambda self, *arguments, **named: None})
    with pytest.raises(InvalidRequest, match=rf"Special overrides {name}\(\)"):
        attach(plain(tmp_path, special), "run")


def test_a_directory_that_is_in_the_way(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    """It is refused before the first step; one that appears later costs the link of its step."""
    (tmp_path / "checkpoint-4").mkdir(parents=True)
    (tmp_path / "checkpoint-4" / "mine.txt").write_text("")
    trainer = attach(plain(tmp_path), run, at=daemon.socket)
    with pytest.raises(InvalidRequest, match="exists, and is not a link") as refused:
        trainer.train()
    assert trainer.state.global_step == 0 and "checkpoint-4;" in str(refused.value.hint)
    (tmp_path / "checkpoint-4").rename(tmp_path / "checkpoint-9")

    class Makes(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                (tmp_path / "checkpoint-9").rename(tmp_path / "checkpoint-4")

    attach(plain(tmp_path, callbacks=[Makes()], save_total_limit=3), run, at=daemon.socket).train()
    assert [step for step in (2, 4, 6) if (tmp_path / f"checkpoint-{step}").is_symlink()] == [2, 6]
    with Api(daemon.url) as api:
        assert sorted(made.step for made in api.checkpoints(run)) == [2, 4, 6]


def test_a_root_that_loses_its_files_ends_no_training(
    daemon: RunningDaemon, run: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Links are not made meanwhile, and the best model is restored from the run all the same."""
    kept: dict[Path, bytes] = {}

    class Removes(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                mark = daemon.root / naming.ROOT_FILE
                kept[mark] = mark.read_bytes()
                mark.unlink()

    settings = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "loss"}
    trainer = attach(plain(tmp_path, callbacks=[Removes()], save_total_limit=3, **settings), run, at=daemon.socket)
    try:
        trainer.train()
    finally:
        for path, content in kept.items():
            path.write_bytes(content)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert caplog.text.count("was not linked") == 1
    assert trainer.state.best_global_step == 6
    with Api(daemon.url) as api:
        assert sorted(made.step for made in api.checkpoints(run)) == [2, 4, 6]
    with holdfast.open(daemon.root / naming.checkpoint_path(run, 6)) as checkpoint:
        assert checkpoint.manifest.step == 6


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("nowhere", "neither a step nor a path"),
        (-1, "step must be a whole number"),
        (2.5, "is not valid"),
        ("other", "not of run"),
    ],
)
def test_what_cannot_be_resumed_from(daemon: RunningDaemon, run: str, tmp_path: Path, asked: Any, message: str) -> None:
    if asked == "other":
        attach(plain(tmp_path, max_steps=2), f"{run}-other", at=daemon.socket).train()
        asked = tmp_path / "checkpoint-2"
    with pytest.raises(InvalidRequest, match=message):
        attach(plain(tmp_path), run, at=daemon.socket).train(resume_from_checkpoint=asked)


def test_a_second_attach_to_another_run_is_refused(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    trainer = attach(attach(plain(tmp_path, max_steps=2), run, at=daemon.socket), run, at=daemon.socket)
    with pytest.raises(InvalidRequest, match=f"attached to the run {run} already"):
        attach(trainer, f"{run}-other", at=daemon.socket)
    trainer.train()
    attach(trainer, f"{run}-other", at=daemon.socket)


def test_a_run_of_this_name_in_another_root(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    """Its directory is not resumed from, though this run has that step too; and links to it stay where they are."""
    attach(plain(tmp_path, max_steps=4), run, at=daemon.socket).train()
    other = tmp_path / "other-root" / naming.checkpoint_path(run, 2)
    other.mkdir(parents=True)
    (other / naming.COMMIT).write_text("")
    (tmp_path / "checkpoint-9").symlink_to(other.with_name("step-00000009"))
    (tmp_path / "elsewhere").symlink_to(other)
    for asked in (other, tmp_path / "elsewhere"):
        with pytest.raises(InvalidRequest, match=f"not of run {run}, to which the Trainer is attached"):
            attach(plain(tmp_path), run, at=daemon.socket).train(resume_from_checkpoint=str(asked))
    attach(plain(tmp_path, save_total_limit=1), run, at=daemon.socket).train(resume_from_checkpoint=False)
    assert (tmp_path / "checkpoint-9").is_symlink()


def test_whose_checkpoints_a_directory_has(tmp_path: Path) -> None:
    """Those of transformers have a state file and no COMMIT; links count only for the run and the step of their names."""
    assert resuming.own_checkpoint(str(tmp_path / "none")) is None
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-11", "checkpoint-x"):
        (tmp_path / name).mkdir()
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-x"):
        (tmp_path / name / resuming.STATE_FILE).write_text("{}")
    assert resuming.own_checkpoint(str(tmp_path)) == (10, str(tmp_path / "checkpoint-10"))
    (tmp_path / "checkpoint-10" / naming.COMMIT).write_text("")
    assert resuming.own_checkpoint(str(tmp_path)) == (9, str(tmp_path / "checkpoint-9"))
    for step, run in ((20, "a"), (30, "b"), (3, "a")):
        (tmp_path / f"checkpoint-{step}").symlink_to(Path("/root") / naming.checkpoint_path(run, step))
    (tmp_path / "checkpoint-40").symlink_to(Path("/root") / naming.checkpoint_path("a", 41))
    assert list(resuming.links(str(tmp_path), "a")) == [3, 20]
    assert resuming.own_checkpoint(str(tmp_path)) == (9, str(tmp_path / "checkpoint-9"))


def test_what_is_refused_by_name(tmp_path: Path) -> None:
    """FSDP and DeepSpeed are what a Trainer says of itself: neither runs on this machine."""
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_total_limit": 2}
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("auto_find_batch_size", {"auto_find_batch_size": True}, {}),
        ("contradict each other", {"save_total_limit": 2}, {"keep_last": 3}),
        ("needs a daemon on this machine", best | {"eval_steps": 2}, {"at": "http://127.0.0.1:1"}),
        ("attach has no option fenced", {}, {"fenced": True}),
    ]
    for message, settings, options in cases:
        with pytest.raises(InvalidRequest, match=message):
            attach(plain(tmp_path, **settings), "run", **options)
    for name, message in (("is_fsdp_enabled", "FSDP inside"), ("is_deepspeed_enabled", "DeepSpeed inside")):
        trainer = plain(tmp_path)
        setattr(trainer, name, True)
        with pytest.raises(InvalidRequest, match=message):
            attach(trainer, "run")
    with pytest.raises(InvalidRequest, match=r"takes a transformers.Trainer, not a dict"):
        attach({}, "run")  # type: ignore[type-var]
    with pytest.raises(InvalidRequest, match="hyperparameter search"):
        attach(plain(tmp_path), "run").train(trial={"learning_rate": 1})
    trainer = attach(plain(tmp_path), "run")
    with pytest.raises(InvalidRequest, match="no training is running"):
        trainer._save_checkpoint(trainer.model, None)
    assert not os.listdir(tmp_path)


def test_a_daemon_elsewhere(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    """Without links: the run's checkpoints are all there is, and they are resumed from."""
    whole = attach(plain(tmp_path, max_steps=4), run, at=daemon.url)
    whole.train()
    assert not list(tmp_path.glob("checkpoint-*"))
    starts = Starts()
    attach(plain(tmp_path, callbacks=[starts], max_steps=4), run, at=daemon.url).train(resume_from_checkpoint=2)
    assert starts.steps == [2]


def test_the_same_step_of_another_launch(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    """Weights that were not restored from the run do not replace its checkpoints without being told to."""
    attach(plain(tmp_path / "a", max_steps=2), run, at=daemon.socket).train()
    with holdfast.Checkpointer(run, {"model": small_model()}, at=daemon.socket) as other, pytest.raises(AlreadyCommitted):
        other.save(2, wait="durable")
