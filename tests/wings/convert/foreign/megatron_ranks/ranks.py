"""Files of Megatron's ranks for tests, as `save_checkpoint` of Megatron-LM writes them."""

from __future__ import annotations

import argparse
import enum
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from holdfast_formats.mapping.listing import ForeignListing
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.wings.convert.foreign.kinds import choose
from holdfast_service.wings.convert.foreign.known_kinds import KINDS
from holdfast_service.wings.convert.foreign.megatron_ranks import kinds
from tests.wings.convert.foreign.dcp.directories import DirectoryFiles

WIDTH, INNER, WORDS, LAYERS = 8, 12, 16, 4
Tensors = dict[str, torch.Tensor]
ROWS = ("word_embeddings.weight", "linear_qkv.weight", "linear_qkv.bias", "output_layer.weight")
COLUMNS = ("linear_proj.weight", "linear_fc2.weight")


class Backend(enum.Enum):
    """As Megatron's arguments contain."""

    LOCAL = 1


# More of a rank's file: from its directory, the whole names of its tensors in order, and what cuts a rank's part.
Beside = Callable[[Path, list[str], Callable[[str, torch.Tensor], torch.Tensor]], dict[str, Any]]


def model(gated: bool) -> Tensors:
    """A GPT of Megatron-core under its names."""
    torch.manual_seed(0)
    made = {"embedding.word_embeddings.weight": torch.randn(WORDS, WIDTH)}
    for layer in range(LAYERS):
        at = f"decoder.layers.{layer}."
        made |= {
            f"{at}self_attention.linear_qkv.layer_norm_weight": torch.randn(WIDTH),
            f"{at}self_attention.linear_qkv.weight": torch.randn(3 * WIDTH, WIDTH),
            f"{at}self_attention.linear_qkv.bias": torch.randn(3 * WIDTH),
            f"{at}self_attention.linear_proj.weight": torch.randn(WIDTH, WIDTH).bfloat16(),
            f"{at}mlp.linear_fc1.weight": torch.randn((1 + gated) * INNER, WIDTH),
            f"{at}mlp.linear_fc1.bias": torch.randn((1 + gated) * INNER),
            f"{at}mlp.linear_fc2.weight": torch.randn(WIDTH, INNER),
        }
    return {**made, "decoder.final_layernorm.weight": torch.randn(WIDTH), "output_layer.weight": torch.randn(WORDS, WIDTH)}


def part(name: str, tensor: torch.Tensor, rank: int, ranks: int, gated: bool) -> torch.Tensor:
    """What Megatron's column- and row-parallel layers hold on a rank."""
    if "linear_fc1" in name:
        both = tensor.chunk(2) if gated else (tensor,)
        return torch.cat([one.chunk(ranks)[rank] for one in both])
    if name.endswith(ROWS):
        return tensor.chunk(ranks)[rank].clone()
    return tensor.chunk(ranks, 1)[rank].clone() if name.endswith(COLUMNS) else tensor


def nested(tensors: Tensors) -> dict[str, Any]:
    """As modules outside of Megatron-core save themselves: the language model in a dict of its own."""
    made: dict[str, Any] = {}
    for name, tensor in tensors.items():
        outer, _, inner = name.partition(".")
        made.setdefault(outer, {})[inner] = tensor
    return made


def saved(
    top: Path,
    ranks: int,
    stages: int,
    gated: bool = True,
    chunks: int = 1,
    deep: bool = False,
    beside: Beside | None = None,
    tensors: Tensors | None = None,
    **more: Any,
) -> Tensors:
    """Write a checkpoint in this many parts; the whole model."""
    whole, each = model(gated) if tensors is None else tensors, LAYERS // stages // chunks
    top.mkdir(parents=True, exist_ok=True)
    (top / "latest_checkpointed_iteration.txt").write_text("20")
    for stage in range(stages):
        for rank in range(ranks):
            sizes = {"tensor_model_parallel_size": ranks, "pipeline_model_parallel_size": stages}
            arguments = argparse.Namespace(swiglu=gated, kind=Backend.LOCAL, **sizes)
            value: dict[str, Any] = {"args": arguments, "checkpoint_version": 3.0, "iteration": 20}
            mine: list[str] = []  # whole names, in the order of the modules
            for chunk in range(chunks):
                first = (chunk * stages + stage) * each
                own: Tensors = {}
                for name, tensor in whole.items():
                    layer = int(name.split(".")[2]) if "layers" in name else None
                    begins, ends = stage == chunk == 0, stage == stages - 1 and chunk == chunks - 1
                    if layer is None and not (begins if "embedding" in name else ends):
                        continue
                    if layer is not None and not first <= layer < first + each:
                        continue
                    local = name if layer is None else name.replace(f"layers.{layer}.", f"layers.{layer - first}.")
                    own[local] = part(name, tensor, rank, ranks, gated)
                    mine.append(name)
                extra = {"decoder._extra_state": None, "decoder.layers.0._extra_state": io.BytesIO(b"scales")}
                value["model" if chunks == 1 else f"model{chunk}"] = nested(own) if deep else {**own, **extra}
            value |= {"opt_param_scheduler": {"max_lr": 0.5}, **more}
            place = top / "iter_0000020" / (f"mp_rank_{rank:02}" if stages == 1 else f"mp_rank_{rank:02}_{stage:03}")
            place.mkdir(parents=True)
            if beside is not None:
                value |= beside(place, mine, lambda name, tensor, rank=rank: part(name, tensor, rank, ranks, gated))
            torch.save(value, place / "model_optim_rng.pt")
    return whole


def read(top: Path, **options: Any) -> ForeignListing:
    files = DirectoryFiles(top)
    assert choose(files, None, KINDS) is kinds.KIND
    return kinds.KIND.read(files, ReadOptions(**options))


def change(top: Path, rank: str, spoil: Callable[[dict[str, Any]], object]) -> None:
    """Change the value in a rank's file."""
    path = top / "iter_0000020" / rank / "model_optim_rng.pt"
    value = torch.load(path, weights_only=False)
    spoil(value)
    torch.save(value, path)
