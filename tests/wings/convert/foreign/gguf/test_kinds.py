"""GGUF files become models under Hugging Face's names, each element where it was before llama.cpp's conversion."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import deserialize

from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError, CorruptManifest, InvalidRequest, StateMismatch
from holdfast_formats.mapping.listing import ForeignListing
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_formats.rest.offline import RootJob
from holdfast_service.offline.__main__ import main
from holdfast_service.wings.convert.foreign.gguf import kinds, quantised
from holdfast_service.wings.convert.foreign.gguf.encoding import Unsigned
from holdfast_service.wings.convert.foreign.kinds import choose
from holdfast_service.wings.convert.foreign.known_kinds import KINDS
from tests.job_requests import an_import
from tests.wings.convert.foreign.directories import OnDisk
from tests.wings.convert.foreign.gguf.files import LLAMA, Arrays, a_llama, encoded, llama

FACTORS = {"rope_freqs.weight": np.ones(4, np.float32)}


def read(directory: Path, **options: Any) -> ForeignListing:
    assert choose(OnDisk(directory), None, KINDS) is kinds.KIND
    return kinds.read(OnDisk(directory), ReadOptions(**options))


def imported(source: Path, root: Path, **options: Any) -> dict[str, bytes]:
    """The bytes of a committed checkpoint's tensors, by name."""
    job = an_import("m", 1, **{"from": str(source)}, **options)
    assert main(RootJob(root=str(root), job=job).model_dump_json(by_alias=True)) == 0
    held = (root / naming.checkpoint_path("m", 1) / "model.safetensors").read_bytes()
    return {name: bytes(one["data"]) for name, one in deserialize(held)}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_llama_to_the_bit(tmp_path: Path, dtype: Any) -> None:
    """Rows of queries and keys in the order of Hugging Face; what follows from the configuration is left out, and said."""
    arrays = a_llama(tmp_path / "source" / "m.gguf", dtype, FACTORS)
    assert imported(tmp_path / "source", tmp_path / "root") == {name: array.tobytes() for name, array in arrays.items()}
    listing = read(tmp_path / "source")
    assert any("rope_freqs.weight" in note for note in listing.notes) and any(
        "config.json" in note for note in listing.notes
    )
    metadata = json.loads(listing.made_assets["gguf_metadata.json"])
    assert metadata["tokenizer.ggml.tokens"] == ["a", "b", "é"]


def test_as_it_is(tmp_path: Path) -> None:
    """Names, rows, and all tensors of the file."""
    a_llama(tmp_path / "source" / "m.gguf", np.float32, FACTORS)
    listing = read(tmp_path / "source", as_is=True)
    assert {key.name for key in listing.tensors} == {name for name, _, _ in llama(np.float32).values()} | {*FACTORS}


def test_norms_of_a_gemma(tmp_path: Path) -> None:
    """They are stored plus one."""
    norm = np.array([1.5, 0.25], np.float32)
    data = encoded({"general.architecture": "gemma2"}, {"output_norm.weight": norm})
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "m.gguf").write_bytes(data)
    assert imported(tmp_path / "source", tmp_path / "root") == {"model.norm.weight": (norm - 1).tobytes()}
    assert any("plus one" in note for note in read(tmp_path / "source").notes)


def parts(directory: Path, count: int, present: int, stated: int | None = None) -> None:
    for number in range(present):
        metadata = {**LLAMA, "split.count": Unsigned(count if stated is None else stated)} if number == 0 else {}
        name = "token_embd.weight" if number == 0 else "output_norm.weight"
        path = directory / f"m-{number + 1:05}-of-{count:05}.gguf"
        path.write_bytes(encoded(metadata, {name: np.ones(4, np.float32)}))


def test_parts_of_one_model(tmp_path: Path) -> None:
    parts(tmp_path, 2, 2)
    assert {key.name for key in read(tmp_path).tensors} == {"model.embed_tokens.weight", "model.norm.weight"}


def test_a_model_of_hugging_face_is_preferred(tmp_path: Path) -> None:
    """Beside it, the file is the same model for another program."""
    a_llama(tmp_path / "m.gguf", np.float32)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert not kinds.recognises(OnDisk(tmp_path))


def _write(directory: Path, metadata: Any, arrays: Arrays) -> None:
    (directory / "m.gguf").write_bytes(encoded(metadata, arrays))


def _two(directory: Path) -> None:
    a_llama(directory / "other.gguf", np.float32)


def _heads(directory: Path) -> None:
    _write(directory, {"general.architecture": "llama"}, {})


def _rows(directory: Path) -> None:
    _write(directory, LLAMA, {"blk.0.attn_q.weight": np.ones((6, 4), np.float32)})


def _bytes_gone(directory: Path) -> None:
    file = directory / "m.gguf"
    file.write_bytes(file.read_bytes()[:-64])


def _overlapping(directory: Path) -> None:
    data = bytearray((directory / "m.gguf").read_bytes())
    at = data.index(b"output_norm.weight") + len(b"output_norm.weight") + struct.calcsize("<IQI")
    data[at : at + 8] = bytes(8)
    (directory / "m.gguf").write_bytes(data)


def _quantised(directory: Path) -> None:
    file = directory / "m.gguf"
    data = bytearray(file.read_bytes())
    at = data.index(b"token_embd.weight") + len(b"token_embd.weight") + struct.calcsize("<IQQ")
    data[at : at + 4] = struct.pack("<I", 8)
    file.write_bytes(data)


REFUSED: dict[str, tuple[Callable[[Path], None], str, type[CheckpointError]]] = {
    "two models": (_two, "not all parts of one model", StateMismatch),
    "no heads": (_heads, "attention heads", StateMismatch),
    "an architecture": (lambda directory: _write(directory, {"general.architecture": "rwkv"}, {}), "'rwkv'", StateMismatch),
    "a name": (lambda directory: _write(directory, LLAMA, {"blk.0.ffn_gate_exps.weight": np.ones(2, np.float32)}),
               "ffn_gate_exps", StateMismatch),
    "rows": (_rows, "4 heads do not divide", StateMismatch),
    "cut off": (_bytes_gone, "ends at byte", CorruptManifest),
    "an overlap": (_overlapping, "overlap", CorruptManifest),
    "quantised": (_quantised, "pip install gguf", StateMismatch),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By file and tensor, with an option or a step that goes on."""
    monkeypatch.setattr(quantised, "library", lambda: None)
    a_llama(tmp_path / "m.gguf", np.float32)
    spoil, says, error = REFUSED[what]
    spoil(tmp_path)
    with pytest.raises(error, match=says) as refused:
        read(tmp_path)
    assert refused.value.members["file"] in ("m.gguf", "other.gguf") and refused.value.hint


@pytest.mark.parametrize(("count", "present", "stated"), [(3, 2, None), (1, 1, 4)])
def test_parts_that_are_missing(tmp_path: Path, count: int, present: int, stated: int | None) -> None:
    parts(tmp_path, count, present, stated)
    with pytest.raises(StateMismatch, match="part"):
        read(tmp_path)


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no GGUF file"):
        kinds.read(OnDisk(tmp_path), ReadOptions())
