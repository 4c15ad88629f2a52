"""A GGUF file of a checkpoint: names, layouts, dtypes, and what is refused; read here by a few lines of its own.

tests/integrations/gguf reads it with the package `gguf` and with transformers.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from holdfast_formats.errors import CheckpointError, InvalidRequest, NoSuchResource, StateMismatch
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.wings.convert.exports import gguf, ordered_tensors
from holdfast_service.wings.convert.exports.plan import ExportOptions
from holdfast_service.wings.convert.exports.source import of_listing
from holdfast_service.wings.convert.foreign.gguf import kinds
from tests.wings.convert.exports.sources import Made, llama, made, trained, write
from tests.wings.convert.foreign.dcp.directories import DirectoryFiles, read

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "vocab_size": 12,
}
WEIGHTS = llama()
GROUPS = trained(WEIGHTS)
DTYPES: dict[int, Any] = {0: np.float32, 1: np.float16, 30: ml_dtypes.bfloat16}


def _made(tmp_path: Path, groups: Any = GROUPS, config: dict[str, Any] = CONFIG, **more: Any) -> Made:
    assets = {"config.json": json.dumps(config).encode()}
    return made(tmp_path / "step", groups, assets=assets, **more)


def _tensors(path: Path) -> dict[str, np.ndarray]:
    """Of a file whose metadata end with general.quantization_version, as they do without a tokenizer."""
    data = path.read_bytes()
    magic, version, count, _ = struct.unpack_from("<4sIQQ", data)
    assert (magic, version) == (b"GGUF", 3)
    last = b"general.quantization_version"
    at, placed = data.index(last) + len(last) + 8, list[tuple[str, tuple[int, ...], int, int]]()
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", data, at)
        name = data[at + 8 : at + 8 + length].decode()
        at += 8 + length
        (sides,) = struct.unpack_from("<I", data, at)
        shape = struct.unpack_from(f"<{sides}Q", data, at + 4)[::-1]
        kind, start = struct.unpack_from("<IQ", data, at + 4 + 8 * sides)
        at += 16 + 8 * sides
        placed.append((name, shape, kind, start))
    first = at + -at % 32
    return {
        name: np.frombuffer(data, DTYPES[kind], int(np.prod(shape)), first + start).reshape(shape)
        for name, shape, kind, start in placed
    }


def _file_type(path: Path) -> int:
    data, key = path.read_bytes(), b"general.file_type"
    return int(struct.unpack_from("<I", data, data.index(key) + len(key) + 4)[0])


def test_a_llama(tmp_path: Path) -> None:
    """Queries and keys interleaved, vectors in F32, everything else as it is, with the small files beside."""
    source = _made(tmp_path).source
    plan = gguf.plan(source, ExportOptions())
    out = write(source, plan, tmp_path / "out")
    found = _tensors(out / "model.gguf")
    assert len(found) == len(WEIGHTS)
    queries = WEIGHTS["model.layers.1.self_attn.q_proj.weight"]
    assert found["blk.1.attn_q.weight"].tobytes() == queries.reshape(2, 2, 2, 8).swapaxes(1, 2).tobytes()
    keys = WEIGHTS["model.layers.1.self_attn.k_proj.weight"]
    assert found["blk.1.attn_k.weight"].tobytes() == keys.reshape(1, 2, 2, 8).swapaxes(1, 2).tobytes()
    for ours, theirs in {
        "model.embed_tokens": "token_embd",
        "lm_head": "output",
        "model.layers.0.mlp.down_proj": "blk.0.ffn_down",
    }.items():
        assert found[f"{theirs}.weight"].tobytes() == WEIGHTS[f"{ours}.weight"].tobytes()
    assert found["output_norm.weight"].tolist() == WEIGHTS["model.norm.weight"].astype(np.float32).tolist()
    assert _file_type(out / "model.gguf") == 32
    assert json.loads((out / "config.json").read_text()) == CONFIG
    whats = [one.what for one in plan.left_out]
    assert whats[0] == "the tokenizer in model.gguf" and f"group optim ({3 * len(WEIGHTS)} tensors)" in whats


@pytest.mark.parametrize(("dtype", "kind", "number"), [("F16", np.float16, 1), ("F32", np.float32, 0)])
def test_dtypes_and_averages(tmp_path: Path, dtype: str, kind: Any, number: int) -> None:
    """Other weights in another dtype; vectors are never rounded."""
    source = _made(tmp_path).source
    plan = gguf.plan(source, ExportOptions(weights="ema", dtype=dtype))
    out = write(source, plan, tmp_path / "out")
    found = _tensors(out / "model.gguf")
    name = "model.layers.0.mlp.up_proj.weight"
    assert found["blk.0.ffn_up.weight"].tobytes() == GROUPS["ema"][name].astype(kind).tobytes()
    assert found["output_norm.weight"].tobytes() == GROUPS["ema"]["model.norm.weight"].tobytes()
    assert _file_type(out / "model.gguf") == number


def test_a_gemma(tmp_path: Path) -> None:
    """Its norms are stored plus one, and its head is its embedding."""
    weights = {name: array for name, array in WEIGHTS.items() if name != "lm_head.weight"}
    config = {**CONFIG, "model_type": "gemma", "head_dim": 4}
    source = _made(
        tmp_path, {"model": weights}, config, aliases={"model": {"lm_head.weight": "model.embed_tokens.weight"}}
    ).source
    plan = gguf.plan(source, ExportOptions())
    found = _tensors(write(source, plan, tmp_path / "out") / "model.gguf")
    norm = weights["model.layers.1.input_layernorm.weight"].astype(np.float32)
    assert found["blk.1.attn_norm.weight"].tolist() == (norm + np.float32(1)).tolist()
    assert found["blk.1.attn_q.weight"].tobytes() == weights["model.layers.1.self_attn.q_proj.weight"].tobytes()
    assert "output.weight" not in found


def test_factors_of_the_rotation(tmp_path: Path) -> None:
    config = {**CONFIG, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}
    source = _made(tmp_path, config=config).source
    found = _tensors(write(source, gguf.plan(source, ExportOptions()), tmp_path / "out") / "model.gguf")
    assert found["rope_freqs.weight"].shape == (2,) and found["rope_freqs.weight"][0] == 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model.layers.0.odd.weight": np.zeros(2, np.float32)}, "has no tensor for 'model.layers.0.odd.weight'"),
        ({"model.layers.2.mlp.up_proj.weight": np.zeros((2, 2), np.float32)}, "blk.2.ffn_up.weight is not in a model of 2"),
        ({"model.norm.weight": None}, "output_norm.weight is missing"),
        ({"model.layers.0.self_attn.q_proj.weight": np.zeros((12, 8), np.float32)}, "12 rows, not 2 heads of 4"),
    ],
)
def test_models_that_do_not_fit(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    weights = {name: array for name, array in {**WEIGHTS, **changed}.items() if array is not None}
    with pytest.raises(StateMismatch, match=said) as caught:
        gguf.plan(_made(tmp_path, {"model": weights}).source, ExportOptions())
    assert "--as hf" in caught.value.hint


def test_a_buffer_is_left_out(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    source = _made(tmp_path, {"model": {**WEIGHTS, name: np.ones(2, np.float32)}}).source
    assert name in {one.what for one in gguf.plan(source, ExportOptions()).left_out}


@pytest.mark.parametrize(
    ("options", "kind"), [(ExportOptions(layout="fsdp"), InvalidRequest), (ExportOptions(dtype="F64"), InvalidRequest)]
)
def test_options_that_do_not_apply(tmp_path: Path, options: ExportOptions, kind: type[CheckpointError]) -> None:
    with pytest.raises(kind):
        gguf.plan(_made(tmp_path).source, options)


def test_a_checkpoint_without_its_config(tmp_path: Path) -> None:
    with pytest.raises(NoSuchResource, match=r"config\.json"):
        gguf.plan(made(tmp_path / "step", GROUPS, assets={}).source, ExportOptions())


def test_a_program_that_renames(tmp_path: Path) -> None:
    source = _made(tmp_path, {"model": {name.replace("lm_head", "head"): array for name, array in WEIGHTS.items()}}).source
    text = "name = 'p'\nfrom = 'a'\nto = 'b'\nstatements = '''\nhead.weight -> lm_head.weight\n* -> *\n'''"
    program = ordered_tensors.compiled(source, text)
    assert gguf.plan(source, ExportOptions(program=program)).tensors == len(WEIGHTS)


@pytest.mark.parametrize("dtype", [None, "F32", "F16"])
def test_an_import_gives_it_back(tmp_path: Path, dtype: str | None) -> None:
    """The import of an export has its weights, vectors in F32; and the export of that is the same file."""
    source = _made(tmp_path).source
    out = write(source, gguf.plan(source, ExportOptions(dtype=dtype)), tmp_path / "out")
    listing = kinds.KIND.read(DirectoryFiles(out), ReadOptions())
    kind = {"F32": np.float32, "F16": np.float16, None: ml_dtypes.bfloat16}[dtype]
    assert {key.name for key in listing.tensors} == WEIGHTS.keys()
    for name, array in WEIGHTS.items():
        found = read(out, listing, "model", name)
        wanted = array.astype(kind if array.ndim > 1 else np.float32)
        assert (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes()), name
    again = of_listing(DirectoryFiles(out), listing)
    second = write(again, gguf.plan(again, ExportOptions()), tmp_path / "again")
    ours, theirs = _tensors(second / "model.gguf"), _tensors(out / "model.gguf")
    assert ours.keys() == theirs.keys()
    assert all((ours[name].dtype, ours[name].tobytes()) == (one.dtype, one.tobytes()) for name, one in theirs.items())


def test_a_gemma_comes_back(tmp_path: Path) -> None:
    """One is added to its norms and taken away: those of bfloat16 lose nothing in F32."""
    weights = {name: array for name, array in WEIGHTS.items() if name != "lm_head.weight"}
    source = _made(tmp_path, {"model": weights}, {**CONFIG, "model_type": "gemma", "head_dim": 4}).source
    out = write(source, gguf.plan(source, ExportOptions()), tmp_path / "out")
    listing = kinds.KIND.read(DirectoryFiles(out), ReadOptions())
    for name, array in weights.items():
        found = read(out, listing, "model", name)
        assert found.astype(np.float32).tobytes() == array.astype(np.float32).tobytes(), name
