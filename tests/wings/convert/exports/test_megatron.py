"""A torch_dist checkpoint of Megatron-core: what an import reads back is what was exported, under Megatron's names.

tests/integrations/megatron has what Megatron-core itself loads.
"""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.wings.convert.exports import megatron
from holdfast_service.wings.convert.exports.plan import ExportOptions
from holdfast_service.wings.convert.foreign.dcp import kinds
from tests.wings.convert.exports.sources import LLAMA, llama, made, trained, values_of, write
from tests.wings.convert.foreign.dcp.directories import DirectoryFiles, read

pytestmark = pytest.mark.filterwarnings("ignore:.*TypedStorage:UserWarning")

CONFIG = json.dumps({**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 12}).encode()
WIDTH = 8


def own(layers: int = 2, experts: int = 3) -> dict[str, np.ndarray]:
    """A model of Megatron's with experts, under the names that its imports have."""
    rng = np.random.default_rng(5)
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (12, WIDTH)}
    for layer in range(layers):
        at = f"decoder.layers.{layer}."
        shapes |= {f"{at}self_attention.linear_qkv.weight": (2 * WIDTH, WIDTH), f"{at}mlp.router.weight": (experts, WIDTH)}
        for expert in range(experts):
            shapes |= {f"{at}mlp.experts.{expert}.experts.linear_fc1.weight": (6, WIDTH)}
    shapes |= {"decoder.final_layernorm.weight": (WIDTH,)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def keys(directory: Path) -> dict[str, tuple[int, ...] | None]:
    """What torch finds in `.metadata`."""
    held = FileSystemReader(directory / "release").read_metadata().state_dict_metadata
    return {key: tuple(one.size) if hasattr(one, "size") else None for key, one in held.items()}


def back(directory: Path) -> dict[str, np.ndarray]:
    files = DirectoryFiles(directory / "release")
    listing = kinds.read_megatron(files, ReadOptions())
    return {key.name: read(files.root, listing, *key) for key in listing.tensors if key.group == "model"}


@pytest.mark.parametrize("layout", [None, "stacked", "by-number"])
def test_a_model_with_megatrons_names(tmp_path: Path, layout: str | None) -> None:
    """Experts and equal layers are stacked, or layers are named by their numbers; all of it is read back as it was."""
    tensors = own()
    source = made(tmp_path / "step", {"model": tensors}).source
    out = write(source, megatron.plan(source, ExportOptions(layout=layout)), tmp_path / "out")
    found, by_number = keys(out), layout == "by-number"
    fc1 = "mlp.experts.experts.linear_fc1"
    if by_number:
        assert found[f"decoder.layers.1.{fc1}.weight"] == (3, 6, WIDTH)
        assert f"decoder.layers.1.{fc1}._extra_state/shard_2_3" in found
        assert "decoder.layers.0.self_attention.core_attention._extra_state/shard_0_1" in found
    else:
        assert found[f"decoder.layers.{fc1}.weight"] == (2, 3, 6, WIDTH)
        assert f"decoder.layers.{fc1}._extra_state/shard_1.2_2.3" in found
        assert "decoder.layers.self_attention.linear_qkv._extra_state/shard_1_2" in found
    made_again = back(out)
    assert made_again.keys() == tensors.keys()
    assert all(np.array_equal(made_again[name], one) for name, one in tensors.items())
    common = torch.load(out / "release/common.pt", weights_only=True)
    assert common["content_metadata"]["non_homogeneous_layers"] is by_number and common["checkpoint_version"] == 3.0
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert json.loads((out / "release/metadata.json").read_text())["sharded_backend"] == "torch_dist"


def test_a_model_of_hugging_face(tmp_path: Path) -> None:
    """The program for its model fuses and renames; small files stay beside the release, and the rest is said."""
    weights = llama()
    source = made(tmp_path / "step", trained(weights), assets={"config.json": CONFIG}, ranks=values_of(list(weights))).source
    plan = megatron.plan(source, ExportOptions())
    out = write(source, plan, tmp_path / "out")
    found = back(out)
    gate, up = (weights[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    fused = found["decoder.layers.1.mlp.linear_fc1.weight"]
    assert fused.dtype == ml_dtypes.bfloat16 and np.array_equal(fused, np.concatenate([gate, up]))
    assert np.array_equal(found["output_layer.weight"], weights["lm_head.weight"])
    assert any("program 'hf-megatron'" in note for note in plan.notes)
    assert any(one.what.startswith("group optim") for one in plan.left_out)
    assert (out / "config.json").read_bytes() == CONFIG


def test_masters_in_another_dtype(tmp_path: Path) -> None:
    """Any weights in any dtype, as other exports have them."""
    weights = llama()
    groups = trained(weights)
    source = made(tmp_path / "step", groups, assets={"config.json": CONFIG}).source
    out = write(source, megatron.plan(source, ExportOptions(weights="master", dtype="F16")), tmp_path / "out")
    assert np.array_equal(back(out)["decoder.final_layernorm.weight"], groups["master"]["model.norm.weight"].astype("f2"))


def test_layers_that_differ(tmp_path: Path) -> None:
    """They are named by their numbers, as Megatron asks for them then; to stack them is refused."""
    tensors = {name: one for name, one in own().items() if not ("layers.1" in name and "router" in name)}
    source = made(tmp_path / "step", {"model": tensors}).source
    out = write(source, megatron.plan(source, ExportOptions()), tmp_path / "out")
    assert "decoder.layers.0.mlp.router.weight" in keys(out) and back(out).keys() == tensors.keys()
    with pytest.raises(StateMismatch, match="cannot be stacked") as refused:
        megatron.plan(source, ExportOptions(layout="stacked"))
    assert "--layout by-number" in (refused.value.hint or "")


def test_what_is_refused(tmp_path: Path) -> None:
    """A layout of another program, a model without a program, and experts that are not all there."""
    source = made(tmp_path / "a", {"model": llama()}, assets={"config.json": b'{"model_type": "bert"}'}).source
    with pytest.raises(InvalidRequest, match="no layout 'fsdp' of Megatron"):
        megatron.plan(source, ExportOptions(layout="fsdp"))
    with pytest.raises(InvalidRequest, match="no program converts hf to megatron"):
        megatron.plan(source, ExportOptions())
    tensors = {name: one for name, one in own().items() if "experts.1." not in name}
    source = made(tmp_path / "b", {"model": tensors}).source
    with pytest.raises(StateMismatch, match=r"experts .* have it"):
        megatron.plan(source, ExportOptions())
