"""The training of `causal.py` in torch, by transformers: `reference.py SOURCE ROOT RUN OUT.npz [--save STEP] [--steps N]`.

SOURCE is a checkpoint's directory, read by `from_pretrained`. With several processes of torchrun the model is sharded, by
`--how fsdp` or `--how tp`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed import device_mesh, fsdp
from torch.distributed.tensor import parallel
from torch.nn import functional

sys.modules["torchcodec"] = None  # type: ignore[assignment]  # paddlecodec puts a module of this name beside transformers

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from holdfast import Checkpointer  # noqa: E402

RATE, BETAS, EPSILON, DECAY = 1e-3, (0.9, 0.98), 1e-8, 0.05


def rows(first: int, count: int) -> list[torch.Tensor]:
    """The same as `causal.rows`."""
    found = [np.random.RandomState(step).randint(1, 64, (4, 16)) for step in range(first, first + count)]
    return [torch.from_numpy(row) for row in found]


def sharded(model: Any, how: str) -> Any:
    if how == "fsdp":
        mesh = device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for layer in model.model.layers:
            fsdp.fully_shard(layer, mesh=mesh)
        return fsdp.fully_shard(model, mesh=mesh)
    mesh = device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
    plan = {f"self_attn.{name}_proj": parallel.ColwiseParallel() for name in "qkv"}
    plan |= {f"mlp.{name}_proj": parallel.ColwiseParallel() for name in ("gate", "up")}
    plan |= {"self_attn.o_proj": parallel.RowwiseParallel(), "mlp.down_proj": parallel.RowwiseParallel()}
    for layer in model.model.layers:
        parallel.parallelize_module(layer, mesh, plan)
    return model


def groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.parameters())
    return [
        {"params": [one for one in named if one.ndim > 1], "weight_decay": DECAY},
        {"params": [one for one in named if one.ndim == 1], "weight_decay": 0.0},
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("source", "root", "run", "out"):
        parser.add_argument(name)
    parser.add_argument("--save", type=int)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--how", choices=["plain", "fsdp", "tp"], default="plain")
    given = parser.parse_args()
    torch.manual_seed(1)
    if given.steps or given.save is not None:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(given.source), dtype=torch.float32)
        missing: dict[str, Any] = {}
    else:
        model, missing = AutoModelForCausalLM.from_pretrained(given.source, output_loading_info=True)
    if given.how != "plain":
        torch.distributed.init_process_group("gloo")
        model = sharded(model, given.how)
    losses = []
    if given.steps or given.save is not None:
        optimizer = torch.optim.AdamW(groups(model), lr=RATE, betas=BETAS, eps=EPSILON)
        with Checkpointer(given.run, {"model": model, "optimizer": optimizer}, at=given.root) as checkpointer:
            begun = checkpointer.restore()
            for tokens in rows(begun, given.steps):
                out = model(input_ids=tokens, use_cache=False).logits
                loss = functional.cross_entropy(out[:, :-1].reshape(-1, out.shape[-1]), tokens[:, 1:].reshape(-1))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            if given.save is not None:
                assets = {"config.json": (Path(given.source) / "config.json").read_bytes()}
                checkpointer.save(given.save, wait="durable", assets=assets)
    with torch.no_grad():
        seen = model(input_ids=rows(1000, 1)[0], use_cache=False).logits
    problems = json.dumps({key: sorted(map(str, value)) for key, value in missing.items()})
    if given.how == "plain" or torch.distributed.get_rank() == 0:
        np.savez(given.out, losses=np.array(losses), logits=seen.numpy(), problems=problems)


if __name__ == "__main__":
    main()
