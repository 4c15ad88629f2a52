"""A tiny model under any kind of engine, on the CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tests.daemons import free_port

os.environ.setdefault("DS_ACCELERATOR", "cpu")
VOCABULARY, WIDTH = 61, 24  # odd, so that partitions are padded and end inside of parameters


class Net(nn.Module):
    """An embedding tied to the head, dropout, a buffer that the forward changes, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH + 1)
        self.norm = nn.LayerNorm(WIDTH + 1)
        self.register_buffer("seen", torch.zeros(WIDTH + 1))
        self.dropout = nn.Dropout(0.2)
        self.out = nn.Linear(WIDTH + 1, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(self.norm(self.mix(self.embed(rows).mean(1))))
        if self.training:
            self.seen.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        hidden = hidden - self.seen.to(hidden.dtype)
        out = self.out(torch.relu(hidden)) * self.scale + self.frozen
        return (out @ self.embed.weight.t()).float().logsumexp(-1).mean() + out.float().square().mean()


def config(stage: int, kind: str = "fp32", **more: Any) -> dict[str, Any]:
    """DeepSpeed's configuration of a stage and a kind: fp32, bf16, bf16-accumulated, fp16 or offloaded.

    `more` replaces members.
    """
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5, "total_num_steps": 100}},
        "steps_per_print": 10**9,
    }
    if stage == 3:  # small groups, and some parameters that stay whole
        made["zero_optimization"] |= {"sub_group_size": 1000, "stage3_param_persistence_threshold": 30}
    if kind == "offloaded":
        made["zero_optimization"] |= {"offload_optimizer": {"device": "cpu"}}
        made["zero_force_ds_cpu_optimizer"] = False
    if kind.startswith("bf16"):
        made["bf16"] = {"enabled": True}
    if kind == "bf16-accumulated":
        made["data_types"] = {"grad_accum_dtype": "fp32"}
    if kind == "fp16":
        made["fp16"] = {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 4, "hysteresis": 2}
    return made | more


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups, one without weight decay."""
    trained = [(len(getattr(p, "ds_shape", p.shape)), p) for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for dimensions, p in trained if dimensions > 1]},
        {"params": [p for dimensions, p in trained if dimensions < 2], "weight_decay": 0.0},
    ]


def engine(chosen: Mapping[str, Any], seed: int = 0, optimizer: Any = None, model: Any = Net) -> Any:
    """An engine with a new `model()`; `optimizer` makes one of the groups, in the place of the configuration's."""
    import deepspeed
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops import __compatible_ops__ as compatible_ops

    get_accelerator().is_fp16_supported = lambda: True  # it works on the CPU; DeepSpeed says that it does not
    compatible_ops["deepspeed_shm_comm"] = False  # a minute of compiling, to make gloo faster
    if "RANK" not in os.environ:  # a script that was started plainly: DeepSpeed would look for MPI
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(alone | {"MASTER_PORT": str(free_port())})
    if not comm.is_initialized():
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(seed)
    if chosen["zero_optimization"]["stage"] == 3:
        with deepspeed.zero.Init(config_dict_or_path=dict(chosen)):
            new = model()
        for module in new.modules():  # Init makes buffers of the type of the parameters, and other stages do not
            module._buffers.update({name: buffer.float() for name, buffer in module._buffers.items()})
    else:
        new = model()
    given = {"optimizer": optimizer(groups(new))} if optimizer else {"model_parameters": groups(new)}
    made, *_ = deepspeed.initialize(model=new, config=dict(chosen), **given)
    return made


def step(made: Any, rows: torch.Tensor) -> float:
    """One step on these rows; the loss."""
    loss = made(rows)
    made.backward(loss)
    made.step()
    return float(loss.detach())


def tensors(made: Any) -> dict[str, torch.Tensor]:
    """Weights, masters and moments as whole tensors, on every rank, by DeepSpeed's own functions."""
    from deepspeed import zero
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(made.optimizer, "_hp_optimizer_states_linked"):  # DeepSpeed links the first parameter group only
        made.optimizer._hp_optimizer_states_linked = False
        made.optimizer._lazy_init_hp_params_optimizer_state()
    found: dict[str, torch.Tensor] = dict(made.module.named_buffers())
    for name, parameter in made.module.named_parameters():
        with zero.GatheredParameters([parameter]) if hasattr(parameter, "ds_id") else torch.no_grad():
            found[name] = parameter.detach().clone()
        if not parameter.requires_grad:
            continue
        if made.zero_optimization() or hasattr(parameter, "_hp_mapping"):
            found[f"{name}/master"] = safe_get_full_fp32_param(parameter)
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{name}/{key}"] = safe_get_full_optimizer_state(parameter, key)
    if isinstance(made.optimizer, torch.optim.Optimizer):
        return found | moments(made.module, made.optimizer)
    if not made.zero_optimization():
        for number, kept in enumerate(made.optimizer.optimizer.state.values()):
            found |= {f"{number}/{key}": value for key, value in kept.items() if isinstance(value, torch.Tensor)}
        masters = getattr(made.optimizer, "fp32_groups_flat", ())
        found |= {f"{number}/master": value for number, value in enumerate(masters)}
    return found


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The moments of a torch optimizer over the parameters themselves, by name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    keys = ("exp_avg", "exp_avg_sq")
    return {f"{names[p]}/{key}": kept[key] for p, kept in optimizer.state.items() for key in keys if key in kept}
