"""Committed checkpoints in memory to be exported, and what an export writes of them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from holdfast_formats.disk import state_json
from holdfast_formats.mapping import optimizer_state, reading, target_files
from holdfast_formats.mapping.committed_files import CommittedFiles
from holdfast_service.storage import PosixTier
from holdfast_service.wings.convert.exports.plan import ExportPlan
from holdfast_service.wings.convert.exports.source import ExportSource, of_committed
from tests.checkpoints import Arrays, Built, build

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "num_hidden_layers": 2}
BETAS = (0.9, 0.95)


class Made(NamedTuple):
    """A checkpoint on disk, opened as a source."""

    built: Built
    source: ExportSource


def made(directory: Path, arrays: Arrays, **how: Any) -> Made:
    """A committed checkpoint of these arrays."""
    built = build(directory, arrays, **how)
    return Made(built, of_committed(CommittedFiles(PosixTier(directory), built.manifest), built.manifest))


def llama(seed: int = 0, hidden: int = 8, layers: int = 2) -> dict[str, np.ndarray]:
    """The weights of a small Llama in bfloat16, under transformers' names and in its layout."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (12, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}self_attn.{name}_proj.weight": (hidden, hidden) for name in "qo"}
        shapes |= {f"{at}self_attn.{name}_proj.weight": (hidden // 2, hidden) for name in "kv"}
        shapes |= {f"{at}mlp.{name}_proj.weight": (3 * hidden, hidden) for name in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj.weight": (hidden, 3 * hidden)}
        shapes |= {f"{at}{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (12, hidden)}
    return {name: rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}


def trained(weights: Mapping[str, np.ndarray], step: int = 2, seed: int = 1) -> dict[str, dict[str, np.ndarray]]:
    """The groups of a checkpoint with masters, averages and AdamW's state."""
    rng = np.random.default_rng(seed)

    def drawn(shape: tuple[int, ...]) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    optim = {}
    for name, weight in weights.items():
        optim[f"{name}/exp_avg"] = drawn(weight.shape)
        optim[f"{name}/exp_avg_sq"] = np.abs(drawn(weight.shape))
        optim[f"{name}/step"] = np.array(step, np.float32)
    return {
        "model": dict(weights),
        "master": {name: drawn(weight.shape) for name, weight in weights.items()},
        "ema": {name: drawn(weight.shape) for name, weight in weights.items()},
        "optim": optim,
        "extra": {},
    }


def values_of(names: list[str], betas: tuple[float, float] = BETAS, ranks: int = 1) -> dict[int, state_json.Values]:
    """What ranks say beside tensors: the optimizer's document, and a position of their own."""
    document = optimizer_state.document([(names, {"lr": 1e-3, "betas": {"$tuple": list(betas)}})])
    return {
        rank: {"optim": {"optimizer": json.dumps(document)}, "extra": {"loader": json.dumps({"position": rank})}}
        for rank in range(ranks)
    }


def write(source: ExportSource, plan: ExportPlan, directory: Path) -> Path:
    """All files of an export, each checked; a small stand-in for the service's executor."""
    directory.mkdir(parents=True)
    tensors = {**source.listing.tensors, **plan.computed}
    for file in plan.files:
        target_files.check(file)
        data = bytearray(file.bytes)
        crcs = {}
        for tensor in file.tensors:
            spec = tensor.mapped.spec
            values = reading.elements(source.files, tensors, tensor.mapped, 0, int(np.prod(spec.shape)))
            data[tensor.start : tensor.start + spec.nbytes] = values.tobytes()
            crcs[tensor.mapped.key] = zlib.crc32(values.tobytes())
        for literal in (*file.literals, *(file.sealed(crcs) if file.sealed is not None else ())):
            data[literal.start : literal.start + len(literal.data)] = literal.data
        path = directory / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return directory
