"""An adapter is saved as PEFT saves it, with its optimizer, and PEFT loads the directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    AdaLoraConfig,
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from transformers import Trainer, TrainingArguments

import holdfast
from holdfast import Checkpointer
from holdfast.integrations.peft import adapter, adapter_config
from holdfast.integrations.transformers import attach
from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest
from tests.daemons import RunningDaemon
from tests.integrations.transformers.models import Sentences, small_model
from tests.kit.daemons import own_daemon

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT asks for what transformers has renamed


daemon = own_daemon(listen="none")


def lora(**changed: Any) -> PeftModel:
    settings: dict[str, Any] = {"r": 2, "lora_dropout": 0.1, "target_modules": ["c_attn"], "fan_in_fan_out": True}
    return get_peft_model(small_model(), LoraConfig(**settings | changed))


def trained(model: PeftModel, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        rows = torch.stack([Sentences()[(2 * step + place) % 22]["input_ids"] for place in range(2)])
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "changed",
    [{}, {"modules_to_save": ["ln_f"]}, {"use_dora": True}, {"bias": "lora_only"}, {"trainable_token_indices": [1, 2]}],
    ids=lambda changed: next(iter(changed), "lora"),
)
def test_a_loop_of_ones_own(daemon: RunningDaemon, tmp_path: Path, changed: dict[str, Any]) -> None:
    """The lines of docs/integrations/peft.md."""
    run = f"loop-{next(iter(changed), 'lora')}"
    torch.manual_seed(3)
    model = lora(**changed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    state = {"adapter_model": adapter(model), "optim": optimizer}
    with Checkpointer(run, state, at=daemon.socket, assets=adapter_config(model)) as checkpointer:
        trained(model, optimizer, 3)
        checkpointer.save(3)
        trained(model, optimizer, 3)
    end = get_peft_model_state_dict(model)

    other = lora(**changed)
    others = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad], lr=1e-2)
    with Checkpointer(run, {"adapter_model": adapter(other), "optim": others}, at=daemon.socket) as checkpointer:
        assert checkpointer.restore() == 3
        saved = {name: value.clone() for name, value in get_peft_model_state_dict(other).items()}
        trained(other, others, 3)
    resumed = get_peft_model_state_dict(other)
    assert end.keys() == resumed.keys() and all(torch.equal(value, resumed[name]) for name, value in end.items())

    path = daemon.root / naming.checkpoint_path(run, 3)
    with holdfast.open(path) as checkpoint:
        assert set(checkpoint.tensors["adapter_model"]) == set(saved)
    loaded = get_peft_model_state_dict(PeftModel.from_pretrained(small_model(), path))
    assert saved.keys() == loaded.keys() and all(torch.equal(value, loaded[name]) for name, value in saved.items())


def arguments(output: Path, **changed: Any) -> TrainingArguments:
    settings: dict[str, Any] = {"max_steps": 6, "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-2}
    settings |= {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "per_device_train_batch_size": 2}
    return TrainingArguments(str(output), **settings | changed)


def adapted(output: Path, **changed: Any) -> Trainer:
    torch.manual_seed(3)
    data = [{name: value for name, value in Sentences()[row].items() if name != "row"} for row in range(22)]
    return Trainer(lora(), arguments(output, **changed), train_dataset=data, eval_dataset=data[:4])


def test_a_trainer(daemon: RunningDaemon, tmp_path: Path) -> None:
    """Cut after two steps, it ends as the one that was not; PEFT loads its checkpoint; the best adapter comes back."""
    whole = attach(adapted(tmp_path / "whole"), "whole", at=daemon.socket)
    whole.train()
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 2}
    attach(adapted(tmp_path / "cut"), "cut", at=daemon.socket).train()
    for newer in (4, 6):
        (tmp_path / "cut" / f"checkpoint-{newer}").unlink()
    cut = attach(adapted(tmp_path / "cut"), "cut", at=daemon.socket)
    cut.train(resume_from_checkpoint=2)
    one, other = get_peft_model_state_dict(whole.model), get_peft_model_state_dict(cut.model)
    assert all(torch.equal(value, other[name]) for name, value in one.items())

    path = tmp_path / "whole" / "checkpoint-6"
    assert not (path / "model.safetensors").exists() and not (path / "config.json").exists()
    loaded = get_peft_model_state_dict(PeftModel.from_pretrained(small_model(), path))
    assert all(torch.equal(value, loaded[name]) for name, value in one.items())

    chosen = attach(adapted(tmp_path / "best", **best), "best", at=daemon.socket)
    chosen.train()
    kept = PeftModel.from_pretrained(small_model(), chosen.state.best_model_checkpoint)
    found = get_peft_model_state_dict(kept)
    assert all(torch.equal(value, found[name]) for name, value in get_peft_model_state_dict(chosen.model).items())


def test_what_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="a GPT2LMHeadModel is not a PeftModel"):
        adapter(small_model())
    two = lora()
    two.add_adapter("other", LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    with pytest.raises(InvalidRequest, match="several adapters: default, other"):
        adapter(two)
    assert adapter(two, "other") is not None
    with pytest.raises(InvalidRequest, match="no adapter 'third'"):
        adapter(two, "third")
    prompts = get_peft_model(small_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(InvalidRequest, match="prompt learning"):
        adapter(prompts)
    with pytest.raises(InvalidRequest, match="'pissa_niter_2' changes the base model at random"):
        adapter(lora(init_lora_weights="pissa_niter_2"))
    assert adapter(lora(init_lora_weights="gaussian")) is not None
    adaptive = AdaLoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, total_step=10)
    with pytest.raises(InvalidRequest, match="AdaLoRA keeps the importance"):
        adapter(get_peft_model(small_model(), adaptive))
    trained_too = lora()
    weight = trained_too.base_model.model.transformer.ln_f.weight.requires_grad_()
    optimizer = torch.optim.AdamW([weight], lr=1e-2)
    with pytest.raises(InvalidRequest, match=r"steps the parameter '.*ln_f.weight'"):
        Checkpointer("left-out", {"adapter_model": adapter(trained_too), "optim": optimizer}, at=tmp_path / "root")
    inside = small_model()
    inside.add_adapter(LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    with pytest.raises(InvalidRequest, match=r"adapters from add_adapter\(\)"):
        attach(Trainer(inside, arguments(tmp_path / "output")), "inside", at=tmp_path / "root")


def test_an_adapter_with_tensors_that_are_shared() -> None:
    """VeRA's projections are saved once, under PEFT's names."""
    model = get_peft_model(small_model(), VeraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    stored = adapter(model).state("adapter_model").tensors
    assert set(stored) == set(get_peft_model_state_dict(model))
