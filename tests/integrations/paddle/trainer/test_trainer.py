"""What an attached Trainer of PaddleFormers resumes from, keeps, writes down and refuses."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
import torch
from paddleformers.peft import LoRAConfig, LoRAModel
from paddleformers.trainer import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from paddleformers.trainer.trainer_utils import ShardingOption

from holdfast import Api
from holdfast.integrations.paddle import attach
from holdfast.integrations.paddleformers.trainer import HoldfastPaddleTrainer
from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest, NoSuchCheckpoint
from tests.daemons import RunningDaemon
from tests.integrations.paddle.trainer.models import Sentences, half_net, item, small_llama
from tests.integrations.paddle.trainer.train import Half, tensors_of
from tests.kit.daemons import own_daemon

_runs = itertools.count()
daemon = own_daemon()
paddle.set_device("cpu")


@pytest.fixture
def run() -> str:
    return f"run-{next(_runs)}"


class Rows(Sentences):
    """Rows as a model takes them."""

    def __getitem__(self, row: int) -> Any:
        return {name: value for name, value in item(row, False).items() if name != "row"}


def plain(output: Path, kind: type[Trainer] = Trainer, callbacks: Any = None, model: Any = None, **changed: Any) -> Trainer:
    """A Trainer of six steps, in epochs of six, that saves every second one."""
    settings: dict[str, Any] = {
        "output_dir": str(output),
        "max_steps": 6,
        "save_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "amp_master_grad": False,
        "device": "cpu",
        "report_to": [],
        "disable_tqdm": True,
    }
    arguments = TrainingArguments(**(settings | changed))
    evaluated = Rows(rows=4) if changed.get("evaluation_strategy") else None
    model = small_llama() if model is None else model
    return kind(model=model, args=arguments, train_dataset=Rows(rows=12), eval_dataset=evaluated, callbacks=callbacks)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in tensors_of(trainer).items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


class Starts(TrainerCallback):
    """The step from which each training begins, and its rates."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.rates: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rates.append(kwargs["lr_scheduler"].get_lr())


def links(output: Path) -> list[str]:
    return sorted(entry.name for entry in output.iterdir() if entry.is_symlink() and entry.exists())


def test_a_script_that_is_started_again_goes_on(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    first = attach(plain(tmp_path, max_steps=4), run, at=daemon.socket)
    first.train()
    starts = Starts()
    second = attach(plain(tmp_path, callbacks=[starts]), run, at=daemon.socket)
    second.train()
    assert starts.steps == [4] and second.state.global_step == 6
    with pytest.raises(InvalidRequest, match=f"has already trained the run {run}"):
        second.train()
    second.train(resume_from_checkpoint=True)
    assert starts.steps == [4, 6]


def test_a_run_that_has_ended_stays_as_it_is(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    """Started again in the middle of its last epoch, Paddle's loop would train one more step, at every start."""
    settings = {"max_steps": 5, "save_steps": 5}
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
    for asked, step in ((2, 2), ("4", 4), (tmp_path / "checkpoint-2", 2), (True, 6), ("auto", 6)):
        starts = Starts()
        other = attach(plain(tmp_path, callbacks=[starts], save_strategy="no"), run, at=daemon.socket)
        other.train(resume_from_checkpoint=asked)
        assert starts.steps == [step], asked
        assert_same(weights(whole), weights(other))


def test_nothing_to_resume_from(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    trainer = attach(plain(tmp_path), run, at=daemon.socket)
    with pytest.raises(NoSuchCheckpoint, match="No valid checkpoint found in output directory"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(InvalidRequest, match="Can't find a valid checkpoint"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "nowhere"))


def test_checkpoints_of_paddleformers_go_to_its_own_loading(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    form_of = {"save_checkpoint_format": "unified_checkpoint", "load_checkpoint_format": "unified_checkpoint"}
    whole = plain(tmp_path, **form_of)
    whole.train()
    assert not (tmp_path / "checkpoint-4").is_symlink()
    for asked in (True, tmp_path / "checkpoint-6"):
        starts = Starts()
        other = attach(
            plain(tmp_path, callbacks=[starts], max_steps=8, **form_of), f"{run}-{asked is True}", at=daemon.socket
        )
        other.train(resume_from_checkpoint=asked)
        assert starts.steps == [6] and links(tmp_path) == ["checkpoint-8"]
        (tmp_path / "checkpoint-8").unlink()


@pytest.mark.parametrize("half", [False, True])
def test_the_limit_keeps_the_newest_and_the_best(daemon: RunningDaemon, run: str, tmp_path: Path, half: bool) -> None:
    settings: dict[str, Any] = {
        "evaluation_strategy": "steps",
        "eval_steps": 2,
        "max_steps": 10,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,  # the first one is the best
    }
    kind, model = (Half, half_net()) if half else (Trainer, small_llama())
    if half:
        settings |= {"bf16": True, "fp16_opt_level": "O2", "max_grad_norm": 0.0}
    seen: dict[int, dict[str, torch.Tensor]] = {}

    class Kept(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen[state.global_step] = weights(trainer)

    callbacks = [Kept(), EarlyStoppingCallback(early_stopping_patience=9)]
    trainer = attach(plain(tmp_path, kind, callbacks, model, **settings), run, at=daemon.socket)
    trainer.disable_autocast_context_manager() if half else None
    trainer.train()
    best = max(seen, key=lambda step: metric_of(daemon, run, step))
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    assert links(tmp_path) == sorted({f"checkpoint-{best}", "checkpoint-10"})
    restored = ("model.", "master.")
    found = {name: value for name, value in weights(trainer).items() if name.startswith(restored)}
    assert_same(found, {name: value for name, value in seen[best].items() if name.startswith(restored)})
    assert trainer.args.load_best_model_at_end


def metric_of(daemon: RunningDaemon, run: str, step: int) -> float:
    with Api(daemon.url) as api:
        metrics = {one.step: one.metrics for one in api.checkpoints(run)}
    return float(metrics.get(step, {}).get("eval_loss", -1.0))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_zero_cost_checkpoint", True),
        ("flash_device_save_steps", 2),
        ("pdc_download_ckpt", True),
        ("ignore_load_lr_and_optim", True),
        ("tensorwise_offload_optimizer", True),
        ("ckpt_quant_stage", "O1"),
        ("zcc_ema_loss_threshold", 2.0),
        ("enable_auto_parallel", True),
    ],
)
def test_arguments_that_conflict_are_refused_by_name(tmp_path: Path, name: str, value: Any) -> None:
    trainer = plain(tmp_path)
    setattr(trainer.args, name, value)
    with pytest.raises(InvalidRequest, match=name) as error:
        attach(trainer, "run", at=tmp_path / "root")
    assert error.value.hint


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sep_parallel_size", 2),
        ("context_parallel_size", 2),
        ("expert_model_parallel_size", 2),
        ("sharding", [ShardingOption.SHARD_GRAD_OP, ShardingOption.OFFLOAD]),
        ("stage1_broadcast_overlap", True),
        ("stage1_allgather_overlap", True),
        ("stage2_overlap", True),
        ("stage1_tensor_fusion", True),
        ("pp_sharding_comm_overlap", True),
        ("use_dualpipev", True),
        ("save_checkpoint_format", "sharding_io"),
        ("zcc_save_ema_coef", 0.9),
    ],
)
def test_what_several_ranks_may_not_have_is_refused(
    name: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = plain(tmp_path)
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    setattr(trainer.args, name, value)
    word = "sharding_io" if name == "save_checkpoint_format" else f"{name}="
    with pytest.raises(InvalidRequest, match=word) as error:
        attach(trainer, "run", at=tmp_path / "root")
    assert error.value.hint


def test_arguments_that_saves_take_the_place_of_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = "async_save master_weight_compatible"
    trainer = plain(tmp_path, save_checkpoint_format="unified_checkpoint", unified_checkpoint_config=words)
    trainer.args.use_async_save, trainer.args.save_rng_states = True, False
    attach(trainer, "run", at=tmp_path / "root")
    for expected in ("async_save:", "master_weight_compatible:", "use_async_save=True", "save_rng_states=False"):
        assert expected in caplog.text


def test_limits_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="save_total_limit=2 and keep_last=3"):
        attach(plain(tmp_path, save_total_limit=2), "run", at=tmp_path / "root", keep_last=3)
    with pytest.raises(InvalidRequest, match="attach has no option keep"):
        attach(plain(tmp_path), "run", keep=3)  # type: ignore[call-overload]
    with pytest.raises(InvalidRequest, match="there is no export 'paddle'"):
        attach(plain(tmp_path), "run", exports={"paddle": "out"})


def test_an_overridden_method_that_is_not_called_is_refused(tmp_path: Path) -> None:
    class Own(Trainer):
        def _save(self, *given: Any, **named: Any) -> None: ...

    with pytest.raises(InvalidRequest, match="Own overrides _save"):
        attach(plain(tmp_path, kind=Own), "run", at=tmp_path / "root")


def test_an_override_that_saves_nothing_is_found(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    class Own(Trainer):
        def _save_checkpoint(self, model: Any, metrics: Any = None) -> None: ...

    trainer = attach(plain(tmp_path, kind=Own), run, at=daemon.socket)
    assert isinstance(trainer, HoldfastPaddleTrainer) and isinstance(trainer, Own)
    with pytest.raises(InvalidRequest, match="does not call super"):
        trainer.train()


def test_an_output_directory_inside_the_root_is_refused_before_training(daemon: RunningDaemon, run: str) -> None:
    starts = Starts()
    trainer = attach(plain(daemon.root / "output", callbacks=[starts]), run, at=daemon.socket)
    with pytest.raises(InvalidRequest, match="is inside the root"):
        trainer.train()
    assert starts.rates == []


def test_an_output_directory_that_is_removed_meanwhile_comes_back(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    class Removing(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                shutil.rmtree(tmp_path / "output")

    attach(plain(tmp_path / "output", callbacks=[Removing()]), run, at=daemon.socket).train()
    assert links(tmp_path / "output") == ["checkpoint-4", "checkpoint-6"]
    shutil.rmtree(tmp_path / "output")
    starts = Starts()
    attach(plain(tmp_path / "output", callbacks=[starts], max_steps=8), run, at=daemon.socket).train()
    assert starts.steps == [6] and links(tmp_path / "output") == ["checkpoint-8"]


def test_a_directory_that_is_in_the_way(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    """It is refused before the first step; one that appears later costs the link of its step."""
    (tmp_path / "checkpoint-4" / "mine").mkdir(parents=True)
    starts = Starts()
    with pytest.raises(InvalidRequest, match="exists, and is not a link") as refused:
        attach(plain(tmp_path, callbacks=[starts]), run, at=daemon.socket).train()
    assert starts.rates == [] and "checkpoint-4;" in str(refused.value.hint)
    (tmp_path / "checkpoint-4").rename(tmp_path / "mine")

    class Makes(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                (tmp_path / "mine").rename(tmp_path / "checkpoint-4")

    attach(plain(tmp_path, callbacks=[Makes()]), run, at=daemon.socket).train()
    assert links(tmp_path) == ["checkpoint-2", "checkpoint-6"]
    with Api(daemon.url) as api:
        assert sorted(made.step for made in api.checkpoints(run)) == [2, 4, 6]


def test_links_of_another_run_are_refused_before_training(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    attach(plain(tmp_path), f"{run}-other", at=daemon.socket).train()
    starts = Starts()
    with pytest.raises(InvalidRequest, match=f"which is not a checkpoint of {run}"):
        attach(plain(tmp_path, callbacks=[starts]), run, at=daemon.socket).train()
    assert starts.rates == []


@pytest.mark.parametrize("best", [False, True])
def test_a_root_that_loses_its_files_ends_no_training(
    daemon: RunningDaemon, run: str, tmp_path: Path, best: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Links are not made meanwhile; the best model is restored from the run all the same."""
    mark = daemon.root / naming.ROOT_FILE
    content = mark.read_bytes()

    class Removes(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                mark.unlink()

    settings: dict[str, Any] = {"save_total_limit": 3}
    if best:
        settings |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": False}
        settings |= {"evaluation_strategy": "steps", "eval_steps": 2}
    try:
        attach(plain(tmp_path, callbacks=[Removes()], **settings), run, at=daemon.socket).train()
    finally:
        mark.write_bytes(content)
    assert links(tmp_path) == ["checkpoint-2"] and caplog.text.count("was not linked") == 1
    with Api(daemon.url) as api:
        assert sorted(made.step for made in api.checkpoints(run)) == [2, 4, 6]


def test_a_second_attach_to_another_run_is_refused(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    """Unless the first one is trained. The same run may be given again."""
    trainer = attach(attach(plain(tmp_path), run, at=daemon.socket), run, at=daemon.socket)
    with pytest.raises(InvalidRequest, match=f"attached to the run {run} already"):
        attach(trainer, f"{run}-other", at=daemon.socket)
    trainer.train()
    with Api(daemon.url) as api:
        assert [one.name for one in api.runs(prefix=run)] == [run]
    attach(trainer, f"{run}-other", at=daemon.socket)


def test_false_begins_the_run_again(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    attach(plain(tmp_path), run, at=daemon.socket).train()
    starts = Starts()
    attach(plain(tmp_path, callbacks=[starts], max_steps=2), run, at=daemon.socket).train(resume_from_checkpoint=False)
    assert starts.steps == [0] and links(tmp_path) == ["checkpoint-2"]


def test_other_arguments_of_the_next_launch_count(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    """As in Paddle's own checkpoints, the scheduler's position is restored, and its rates are those of the arguments."""
    settings = {"lr_scheduler_type": "constant", "warmup_steps": 0}
    attach(plain(tmp_path, max_steps=4, **settings), run, at=daemon.socket).train()
    starts = Starts()
    changed = plain(tmp_path, callbacks=[starts], max_steps=8, learning_rate=5e-3, **settings)
    attach(changed, run, at=daemon.socket).train()
    assert starts.steps == [4] and starts.rates == [5e-3] * 4
    assert changed.state.max_steps == 8


def test_a_checkpoint_has_what_belongs_beside_the_weights(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    attach(plain(tmp_path), run, at=daemon.socket).train()
    stored = tmp_path / "checkpoint-4"
    state = json.loads((stored / "trainer_state.json").read_text())
    assert state["global_step"] == 4 and json.loads((stored / "config.json").read_text())["hidden_size"] == 16
    arguments = json.loads((stored / "training_args.json").read_text())
    assert arguments["learning_rate"] == 1e-2 and "wandb_api_key" not in arguments
    with Api(daemon.url) as api:
        metrics = {one.step: one.metrics for one in api.checkpoints(run)}
    assert metrics[4]["loss"] > 0 and "learning_rate" in metrics[4]


def test_the_daemon_keeps_the_average(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    trainer = attach(plain(tmp_path, zcc_save_ema_coef=0.5), run, at=daemon.socket)
    trainer.train()
    assert trainer.args.zcc_save_ema_coef == 0.5
    assert (tmp_path / "checkpoint-6" / "ema.safetensors").is_file(), os.listdir(tmp_path / "checkpoint-6")
    again = attach(plain(tmp_path, zcc_save_ema_coef=0.5, max_steps=8), run, at=daemon.socket)
    again.train()
    assert links(tmp_path) == [f"checkpoint-{step}" for step in (2, 4, 6, 8)]


def adapted(**changed: Any) -> LoRAModel:
    config = {"target_modules": [".*q_proj.*"], "r": 2, "lora_alpha": 4, "dtype": "float32"} | changed
    model = LoRAModel(small_llama(), LoRAConfig(**config))
    model.mark_only_lora_as_trainable()
    return model


class Keeps(TrainerCallback):
    """Counts its steps, and says so."""

    def __init__(self) -> None:
        self.count = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Forgets(TrainerCallback):
    """Counts its steps, and says nothing."""

    def __init__(self) -> None:
        self.count = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count += 1


def test_callbacks_have_their_states_back(
    daemon: RunningDaemon, run: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also the patience of EarlyStoppingCallback; one that changes and says nothing is named once."""
    best = {"evaluation_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "max_steps": 12}
    best |= {"metric_for_best_model": "loss", "greater_is_better": False, "save_total_limit": 2}  # the first one is the best

    def callbacks() -> list[TrainerCallback]:
        return [Keeps(), Forgets(), EarlyStoppingCallback(early_stopping_patience=4)]

    first = plain(tmp_path, Judged, [*callbacks(), EarlyStops(6)], **best)
    attach(first, run, at=daemon.socket).train()
    assert caplog.text.count("Forgets.count changes and is not saved") == 1 and "Keeps" not in caplog.text
    second = attach(plain(tmp_path, Judged, callbacks(), **best), run, at=daemon.socket)
    second.train()
    keeps = next(one for one in second.callback_handler.callbacks if isinstance(one, Keeps))
    assert (second.state.global_step, keeps.count) == (10, 10)  # patience ends with the fifth evaluation, not the eighth
    third = attach(plain(tmp_path, max_steps=12), run, at=daemon.socket)
    third.train()
    assert "the checkpoint has the state of a Keeps, and this Trainer has none" in caplog.text


def test_a_training_that_ends_before_its_first_save_says_so(
    daemon: RunningDaemon, run: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    attach(plain(tmp_path, save_strategy="no"), f"{run}-none", at=daemon.socket).train()
    assert "none of them was saved" not in caplog.text
    attach(plain(tmp_path, save_steps=50), run, at=daemon.socket).train()
    assert f"{run} trained from step 0 to 6, and none of them was saved (save_strategy=steps, save_steps=50)" in caplog.text


class EarlyStops(TrainerCallback):
    """Ends a training at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self.step


class Judged(Trainer):
    """Evaluates without a model: PaddleFormers 1.2.0 cannot evaluate one with LoRA unless PaddleFleet is installed."""

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        metrics = {"eval_loss": float(self.state.global_step)}
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def test_the_best_adapter_comes_back(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    best = {"evaluation_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 2}
    best |= {"metric_for_best_model": "loss", "greater_is_better": False}  # the first one is the best
    two = attach(plain(tmp_path / "two", model=adapted(), callbacks=[EarlyStops(2)]), f"{run}-two", at=daemon.socket)
    two.train()
    trainer = attach(plain(tmp_path / "output", Judged, model=adapted(), **best), run, at=daemon.socket)
    trainer.train()
    found, wanted = ({name: one for name, one in weights(each).items() if "lora" in name} for each in (trainer, two))
    named = [name for name in found if name.startswith("model.")]
    assert named and all(torch.equal(found[name], wanted[name]) for name in named)


def test_of_a_model_with_lora_the_adapter_is_saved(
    daemon: RunningDaemon, run: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Training goes on as one that was not interrupted, the best adapter comes back, and PaddleFormers reads the export."""
    whole = attach(plain(tmp_path / "whole", model=adapted()), f"{run}-whole", at=daemon.root)
    assert "the adapter alone is saved" in caplog.text
    whole.train()
    stops = EarlyStops(4)
    attach(plain(tmp_path / "output", model=adapted(), callbacks=[stops]), run, at=daemon.root).train()
    exports = {"paddle-lora": tmp_path / "lora"}
    again = attach(plain(tmp_path / "output", model=adapted()), run, at=daemon.root, exports=exports)
    again.train()
    assert again.state.global_step == 6
    assert_same(weights(whole), weights(again))
    stored = tmp_path / "output" / "checkpoint-6"
    assert (stored / "adapter_model.safetensors").is_file() and not (stored / "model.safetensors").exists()
    read = LoRAModel.from_pretrained(small_llama(), str(tmp_path / "lora" / "checkpoint-6"))
    for name, tensor in again.model.get_trainable_state_dict().items():
        assert paddle.equal_all(tensor, read.get_trainable_state_dict()[name]), name


def test_an_adapter_that_peft_lacks_is_saved_with_its_base(
    daemon: RunningDaemon, run: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = adapted()
    model.lora_config.do_qat = True
    first = attach(plain(tmp_path, model=model), run, at=daemon.socket)
    assert "do_qat=True: PEFT has no such adapters, so the base model is saved with it" in caplog.text
    first.train()
    model = adapted()
    model.lora_config.do_qat = True
    again = attach(plain(tmp_path, model=model), run, at=daemon.socket)
    again.train()
    assert_same(weights(first), weights(again))


def test_checkpoints_are_exported_after_their_commit(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    """The newest one always; it is complete when the directory has its name."""
    wanted = {"paddle-uc": tmp_path / "uc", "hf": str(tmp_path / "hf")}
    attach(plain(tmp_path / "output"), run, at=daemon.root, exports=wanted).train()
    assert (tmp_path / "uc" / "checkpoint-6" / "optimizer.safetensors.index.json").is_file()
    assert (tmp_path / "hf" / "checkpoint-6" / "config.json").is_file()


def test_paddleformers_alone_goes_on_from_exports(tmp_path: Path) -> None:
    """With the losses and the optimizer of a training that was not interrupted, and what PDC waits for is there."""

    def ran(kind: str) -> dict[str, np.ndarray]:
        words = ["-m", "tests.integrations.paddle.trainer.exported", tmp_path, kind, tmp_path / f"{kind}.npz"]
        done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stderr[-4000:]
        with np.load(tmp_path / f"{kind}.npz") as found:
            return dict(found)

    whole = ran("whole")
    ran("saved")
    for kind in ("uc", "flex"):
        assert (tmp_path / kind / "checkpoint-4" / ".checkpoint_done").is_file()
        resumed = ran(kind)
        assert {name for name in resumed if name.startswith("loss")} == {"loss 5", "loss 6"}
        assert resumed.keys() == {name for name in whole if not name.startswith("loss") or name in ("loss 5", "loss 6")}
        for name, array in resumed.items():
            assert np.array_equal(array, whole[name]), (kind, name)


def test_an_export_that_fails_does_not_end_the_training(
    daemon: RunningDaemon, run: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = attach(plain(tmp_path / "output"), run, at=daemon.root, exports={"peft": tmp_path / "peft"})
    trainer.train()
    assert trainer.state.global_step == 6 and f"{run}@6 was not exported as peft" in caplog.text
