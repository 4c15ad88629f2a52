"""E4: engines and requests that are not covered are refused by name, before anything is staged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast_formats.errors import InvalidRequest

pytestmark = pytest.mark.filterwarnings("ignore")


def refused(engine: Any, tmp_path: Path, told: str) -> None:
    from holdfast.integrations import deepspeed as holdfast_deepspeed

    with pytest.raises(InvalidRequest, match=told):
        holdfast_deepspeed.attach(engine, "run", at=tmp_path / "checkpoints")
    assert not (tmp_path / "checkpoints").exists()


def nvme(engine: Any) -> None:
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig

    engine._config.zero_config.offload_optimizer = DeepSpeedZeroOffloadOptimizerConfig(device="nvme")


def nvme_parameters(engine: Any) -> None:
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadParamConfig

    engine._config.zero_config.offload_param = DeepSpeedZeroOffloadParamConfig(device="nvme")


FEATURES: dict[str, tuple[Callable[[Any], object], str]] = {
    "nvme": (nvme, "offload_optimizer to NVMe"),
    "nvme parameters": (nvme_parameters, "offload_param to NVMe"),
    "moe": (lambda e: setattr(e, "has_moe_layers", True), "MoE layers"),
    "tensor parallelism": (lambda e: setattr(e, "mp_world_size", 2), "tensor parallelism"),
    "sequences": (lambda e: setattr(e, "sequence_parallel_size", 2), "sequence parallelism"),
    "hpz": (lambda e: setattr(e._config.zero_config, "zero_hpz_partition_size", 2), "zero_hpz_partition_size=2"),
    "quantized": (lambda e: setattr(e._config.zero_config, "zero_quantized_weights", True), "zero_quantized_weights"),
    "muon": (lambda e: e.optimizer.optimizer.param_groups[0].update(use_muon=True), "Muon"),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_features_that_are_not_covered(make: Any, tmp_path: Path, feature: str) -> None:
    """Each by its name, when the engine is attached."""
    engine = make(3, run="")
    change, told = FEATURES[feature]
    change(engine)
    refused(engine, tmp_path, told)


def test_engines_that_are_not_covered(make: Any, tmp_path: Path) -> None:
    """A pipeline's engine, something that is no engine, and an engine twice."""
    import deepspeed
    from deepspeed.pipe import PipelineModule
    from torch import nn

    from holdfast.integrations import deepspeed as holdfast_deepspeed
    from tests.integrations.deepspeed import engines

    engine = make(1)
    with pytest.raises(InvalidRequest, match="already attached to a run"):
        holdfast_deepspeed.attach(engine, "other", at=tmp_path / "checkpoints")
    refused(engine.module, tmp_path / "none", "takes a DeepSpeedEngine, not a Net")
    stages = PipelineModule(layers=[nn.Linear(3, 3)], num_stages=1, loss_fn=nn.MSELoss())
    config = engines.config(1, zero_optimization={"stage": 0})
    pipe, *_ = deepspeed.initialize(model=stages, config=config, model_parameters=list(stages.parameters()))
    refused(pipe, tmp_path / "none", "engines of the class PipelineEngine")


def test_state_and_requests_that_are_not_covered(make: Any, tmp_path: Path) -> None:
    """What an engine is asked for, before anything is staged."""
    saves = tmp_path / "saves"
    engine = make(1, gradient_accumulation_steps=2, train_batch_size=8)
    from tests.integrations.deepspeed import engines

    rows = torch.randint(0, 61, (4, 7))
    engines.step(engine, rows)
    with pytest.raises(InvalidRequest, match="during gradient accumulation: the gradients of 1 micro-batches of 2"):
        engine.save_checkpoint(saves)
    engines.step(engine, rows)
    engine.set_gradient_accumulation_boundary(is_boundary=False)  # from now on the script says where steps are made
    engines.step(engine, rows)
    engines.step(engine, rows)  # a number that counting takes for a whole step
    with pytest.raises(InvalidRequest, match="the gradients of micro-batches would be lost"):
        engine.save_checkpoint(saves)
    engine.set_gradient_accumulation_boundary(is_boundary=None)
    with pytest.raises(InvalidRequest, match="exclude_frozen_parameters=True"):
        engine.save_checkpoint(saves, exclude_frozen_parameters=True)
    with pytest.raises(InvalidRequest, match=r"client_state\.rule"):
        engine.save_checkpoint(saves, client_state={"rule": len})
    with pytest.raises(InvalidRequest, match="client_state must be a dict"):
        engine.save_checkpoint(saves, client_state=[1])
    with pytest.raises(ValueError, match="non-empty"):
        engine.save_checkpoint("")
    with pytest.raises(InvalidRequest, match="not the name of a directory below"):
        engine.save_checkpoint(saves, "../up")
    with pytest.raises(InvalidRequest, match="where links are not allowed"):
        engine.save_checkpoint(tmp_path / "checkpoints" / "mine")
    with pytest.raises(InvalidRequest, match="custom_load_fn"):
        engine.load_checkpoint(saves, custom_load_fn=print)
    with pytest.raises(InvalidRequest, match="has no link to a checkpoint"):
        engine.load_checkpoint(saves, "nowhere")
    engine.save_checkpoint(saves, "a", {"n": 1})
    engine.save_checkpoint(saves, "b", {"n": 1})  # the same step, and nothing else: two links
    with pytest.raises(InvalidRequest, match="step 1 is already saved as 'b' with another client_state"):
        engine.save_checkpoint(saves, "c", {"n": 2})
    kept = engine.optimizer.optimizer.state[engine.optimizer.single_partition_of_fp32_groups[0]]
    kept["rows"] = torch.zeros(3)
    with pytest.raises(InvalidRequest, match=r"AdamW keeps 'rows' of shape \[3\]"):
        engine.save_checkpoint(saves, "a", {"n": 1})
    del kept["rows"]
    engine.optimizer.optimizer.state[torch.zeros(2)] = {"exp_avg": torch.zeros(2)}
    with pytest.raises(InvalidRequest, match="for a key that is not a flat tensor"):
        engine.save_checkpoint(saves, "a", {"n": 1})


def test_entries_that_the_engine_has_are_refused(make: Any) -> None:
    """state= may not have the engine's own keys, and a scheduler must have a state."""
    for key in ("model", "optim", "scheduler", "deepspeed"):
        with pytest.raises(InvalidRequest, match=f"has the key {key!r}"):
            make(1, state={key: 1})
    engine = make(1, run="")
    engine.lr_scheduler = object()
    from holdfast.integrations import deepspeed as holdfast_deepspeed

    with pytest.raises(InvalidRequest, match="scheduler object has no state_dict"):
        holdfast_deepspeed.attach(engine, "run")
