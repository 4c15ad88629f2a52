"""Run by torchrun: a model under FSDP1 is trained and saved, or restored, and compared with what torch itself gathers.

    flat_worker.py save|restore SOCKET OUTPUT STRATEGY

Rank 0 writes the digest of every full tensor, gathered by torch, to OUTPUT.json.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from holdfast import Checkpointer
from holdfast_formats.digest import digest
from holdfast_formats.errors import InvalidRequest
from tests.torchruns import leave


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 11)
        self.down = nn.Linear(11, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Sizes that divide by nothing, a tied head, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(1.5))
        self.register_buffer("passing", torch.tensor(0.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def wrap(model: nn.Module, strategy: str, original: bool = True) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=original,
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy[strategy],
    )


def build(seed: int, strategy: str) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Model() if strategy == "plain" else wrap(Model(), strategy)
    return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.1)}


def train(state: dict[str, Any], steps: int) -> None:
    for step in range(steps):
        state["model"](torch.arange(4) + step).square().mean().backward()
        state["optim"].step()
        state["optim"].zero_grad()


def evaluate(state: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return state["model"](torch.arange(7)).clone()


def full(tensor: torch.Tensor) -> str:
    return f"{tensor.numel()} {digest(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())}"


def digests(state: dict[str, Any], strategy: str) -> dict[str, str]:
    """The digest of every tensor of model and optimizer, put together of all ranks' without the product.

    Not by torch's `optim_state_dict`: on gloo it gives exp_avg the values of exp_avg_sq (torch 2.13).
    """
    found = {name: full(value) for name, value in state["model"].state_dict().items()}
    kept: dict[str, torch.Tensor] = {}
    for name, parameter in state["model"].named_parameters():
        for key, value in state["optim"].state.get(parameter, {}).items():
            kept[f"{name.replace('_fsdp_wrapped_module.', '')}/{key}"] = value.detach().clone()
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, kept)
    for name in sorted({name for one in everywhere for name in one}):
        parts = [one[name] for one in everywhere if name in one]
        sharded = parts[0].dim() and strategy not in ("plain", "NO_SHARD")
        found[name] = full(torch.cat(parts) if sharded else parts[0])
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    action, socket, output, strategy = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    state = build(1 if action == "save" else 2, strategy)
    if action == "save":
        train(state, 3)
        evaluate(state)  # leaves the root's parameters gathered behind the shards
        with Checkpointer("r", state, at=socket) as checkpointer:
            checkpointer.save(3, wait="durable")
        try:
            Checkpointer("flat", {"model": wrap(Model(), strategy, original=False)}, at=socket)
        except InvalidRequest as refused:
            assert "use_orig_params=True" in refused.hint
        else:
            raise AssertionError("flat parameters are refused")
        with FullyShardedDataParallel.summon_full_params(state["model"]):
            try:
                Checkpointer("now", state, at=socket)
            except InvalidRequest as refused:
                assert "are gathered" in refused.detail
            else:
                raise AssertionError("gathered parameters are refused")
    else:
        evaluate(state)
        with Checkpointer("r", state, at=socket) as checkpointer:
            assert checkpointer.restore() == 3
    after = evaluate(state)
    found = {**digests(state, strategy), "output": full(after)}
    if dist.get_rank() == 0:
        Path(f"{output}.json").write_text(json.dumps(found))
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
