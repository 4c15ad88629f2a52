"""`holdfast export --as megatron` is loaded by Megatron-core, with other sizes of tensor and pipeline parallelism."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.storage import tier_at
from holdfast_service.wings.convert.exports import megatron
from holdfast_service.wings.convert.exports.plan import ExportOptions
from holdfast_service.wings.convert.exports.source import of_listing
from holdfast_service.wings.convert.foreign.kinds import choose
from holdfast_service.wings.convert.foreign.known_kinds import KINDS
from tests.torchruns import launch
from tests.wings.convert.exports.sources import write

WORKER = "tests.integrations.megatron.exported"


def exported(source: Path, target: Path) -> Path:
    files = tier_at(source)
    made = of_listing(files, choose(files, None, KINDS).read(files, ReadOptions()))
    return write(made, megatron.plan(made, ExportOptions()), target)


@pytest.mark.parametrize(
    ("words", "ranks", "other"),
    [
        ((), 2, ("--tp", "2")),
        (("--bias", "--bf16", "--qk-norm"), 2, ("--pp", "2")),
        (("--experts", "4"), 2, ("--ep", "2")),
        (("--tied",), 2, ("--pp", "2")),
    ],
    ids=["tensors", "stages", "experts", "tied"],
)
def test_megatron_loads_it(tmp_path: Path, words: tuple[str, ...], ranks: int, other: tuple[str, ...]) -> None:
    """The same weights as from the checkpoint that Megatron-core wrote itself, on each of the ranks."""
    trained = tmp_path / "trained"
    launch(1, "tests.integrations.megatron.torch_dist", "--work", str(trained), "--sharding", "none", *words)
    out = exported(trained, tmp_path / "out")
    launch(ranks, WORKER, "--work", str(out), "--against", str(trained), *words, *other)


def test_a_model_of_hugging_face(tmp_path: Path) -> None:
    """A Llama by the program for it, with a vocabulary that Megatron does not pad."""
    source = tmp_path / "hf"
    source.mkdir()
    config = {
        "model_type": "llama",
        "vocab_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
    }
    (source / "config.json").write_text(json.dumps(config))
    torch.manual_seed(3)
    tensors = {"model.embed_tokens.weight": torch.randn(64, 32), "model.norm.weight": torch.randn(32)}
    tensors["lm_head.weight"] = torch.randn(64, 32)
    for layer in range(2):
        at = f"model.layers.{layer}."
        shapes = {"q": (32, 32), "k": (16, 32), "v": (16, 32), "o": (32, 32)}
        tensors |= {f"{at}self_attn.{name}_proj.weight": torch.randn(shape) for name, shape in shapes.items()}
        shapes = {"gate": (48, 32), "up": (48, 32), "down": (32, 48)}
        tensors |= {f"{at}mlp.{name}_proj.weight": torch.randn(shape) for name, shape in shapes.items()}
        tensors |= {f"{at}{name}.weight": torch.randn(32) for name in ("input_layernorm", "post_attention_layernorm")}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    launch(2, WORKER, "--work", str(exported(source, tmp_path / "out")), "--tp", "2")
