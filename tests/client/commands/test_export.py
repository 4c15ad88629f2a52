"""`holdfast export --as`: for another program, from a directory or by a service, with a report that people read."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from holdfast.commands import export
from holdfast_formats import naming
from holdfast_formats.rest.jobs import EXPORT_KINDS
from tests.checkpoints import build, flip
from tests.kit.commands import call, call_json
from tests.serving import served

pytestmark = pytest.mark.usefixtures("forked_programs")

STEP = naming.checkpoint_path("llama", 5)
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG = LlamaConfig(vocab_size=32, num_hidden_layers=1, max_position_embeddings=16, tie_word_embeddings=True, **SIZES)
TIED = {"lm_head.weight": "model.embed_tokens.weight"}


def _arrays(seed: int) -> dict[str, np.ndarray]:
    """Random weights in the model's names, tied ones once."""
    torch.manual_seed(seed)
    state = LlamaForCausalLM(CONFIG).state_dict()
    return {name: tensor.numpy() for name, tensor in state.items() if name not in TIED}


AVERAGES = _arrays(1)


@pytest.fixture
def root(tmp_path: Path, no_service: None) -> Path:
    """A root with a checkpoint that has averages, and no service."""
    model = {name: array.astype(ml_dtypes.bfloat16) for name, array in _arrays(0).items()}
    groups = {"model": model, "ema": {**AVERAGES, "n_averaged": np.array(7)}, "extra": {}}
    config = CONFIG.to_json_string().replace('"dtype": null', '"dtype": "bfloat16"').encode()
    build(tmp_path / "root" / STEP, groups, run="llama", assets={"config.json": config}, aliases={"model": TIED})
    return tmp_path / "root"


def test_averages_load_in_transformers(root: Path, tmp_path: Path) -> None:
    """`from_pretrained` has the averages in the dtype that was asked for, tied again."""
    done = call_json(
        "export", "llama@latest", tmp_path / "a" / "out", "--as", "hf", "--weights", "ema", "--dtype", "fp32", "--root", root
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "out", dtype="auto")
    state = loaded.state_dict()
    assert loaded.dtype == torch.float32 and state["lm_head.weight"] is not None
    for name, array in AVERAGES.items():
        assert np.array_equal(state[name].numpy(), array), name
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert (done["as"], done["to"]) == ("hf", str(tmp_path / "a" / "out"))
    assert {one["what"] for one in done["left_out"]} == {"ema/n_averaged", "values extra/lr"}


def test_a_service_does_it_as_a_job(root: Path, tmp_path: Path) -> None:
    """Below its export root; the report is printed: what was converted, and what is not in it."""
    (tmp_path / "place").mkdir()
    with served(root, tmp_path / "place") as service:
        said = call("export", "llama@5", "out", "--as", "hf", "--weights", "ema", "--url", service.url)
    assert said.exit_code == 0, said.output
    for part in ("exported", "as hf", "rounded from float32 to bfloat16", "left out", "ema/n_averaged"):
        assert part in said.output
    found = load_file(tmp_path / "place" / "out" / "model.safetensors")
    assert found["model.norm.weight"].tobytes() == AVERAGES["model.norm.weight"].astype(ml_dtypes.bfloat16).tobytes()


def test_a_directory_is_exported_without_a_root(root: Path, tmp_path: Path) -> None:
    """A checkpoint's directory anywhere, through a program of a file."""
    program = tmp_path / "mine.toml"
    program.write_text(
        "name = 'mine'\nfrom = 'hf'\nto = 'mine'\nstatements = '''\nmodel.norm.weight -> final.weight\n* -> *\n'''\n"
    )
    assert call("export", root / STEP, tmp_path / "out", "--as", "hf", "--program", program).exit_code == 0
    assert "final.weight" in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["--as", "onnx"], 2, "cannot export as 'onnx'"),
        (["--as", "hf", "--model-only"], 2, "cannot be combined"),
        (["--dtype", "bf16"], 2, "'dtype' of an export needs `as`"),
        (["--as", "hf", "--dtype", "int8"], 2, "'int8'"),
        (["--as", "hf", "--weights", "master"], 3, "no group 'master'"),
        (["--as", "hf", "--program", "missing.toml"], 2, "no file missing.toml"),
        (["--as", "peft"], 3, "no adapter"),
    ],
)
def test_what_is_refused(root: Path, tmp_path: Path, words: list[str], status: int, says: str) -> None:
    """With the exit status of the error, a sentence, and nothing written."""
    said = call("export", "llama@5", tmp_path / "out", *words, "--root", root)
    assert said.exit_code == status and says in said.output
    assert sorted(os.listdir(tmp_path)) == ["root"]


@pytest.mark.parametrize("words", [[], ["--model-only"], ["--as", "hf"]])
def test_no_export_goes_to_an_address(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    """It would be written to a directory `s3:` below the current one."""
    monkeypatch.chdir(tmp_path)
    said = call("export", "llama@5", "s3://bucket/out", *words, "--root", root)
    assert said.exit_code == 2 and "is a URL" in said.output
    assert sorted(os.listdir(tmp_path)) == ["root"]


def test_nothing_is_left_of_what_fails(root: Path, tmp_path: Path) -> None:
    """Damage is named; a target that is there stays; one inside the checkpoint is refused."""
    (tmp_path / "there").mkdir()
    assert call("export", "llama@5", tmp_path / "there", "--as", "hf", "--root", root).exit_code == 4
    assert call("export", "llama@5", root / STEP / "out", "--as", "hf", "--root", root).exit_code == 2
    flip(next((root / STEP).glob("model*.safetensors")), -1 + 4097)
    assert call("export", "llama@5", tmp_path / "out", "--as", "hf", "--root", root).exit_code == 5
    assert sorted(os.listdir(tmp_path)) == ["root", "there"] and not os.listdir(tmp_path / "there")


def test_a_conversion_from_directory_to_directory(root: Path, tmp_path: Path) -> None:
    """With no root and no service: said first, done, refused a second time; what came out is the same model."""
    place = tmp_path / "place"
    assert call("export", "llama@5", place / "hf", "--as", "hf", "--root", root).exit_code == 0
    first = call("convert", place / "hf", place / "dcp", "--as", "dcp", "--dry-run")
    assert first.exit_code == 0 and "would convert" in first.output and ".metadata" in first.output
    told = call_json("convert", place / "hf", place / "dcp", "--as", "dcp", "--dry-run")
    assert told["dry_run"] and told["source"]["kind"] == "hf" and sorted(os.listdir(place)) == ["hf"]
    done = call("convert", place / "hf", place / "dcp", "--as", "dcp", "--from", "hf")
    assert done.exit_code == 0 and "converted" in done.output and "read back" in done.output
    back = call_json("convert", place / "dcp", place / "back", "--as", "hf", "--dtype", "fp32")
    assert back["source"]["kind"] == "dcp" and sorted(os.listdir(place)) == ["back", "dcp", "hf"]
    found, wanted = (load_file(place / name / "model.safetensors") for name in ("back", "hf"))
    assert found.keys() - TIED.keys() == wanted.keys() - TIED.keys()
    assert all(np.array_equal(found[name], array.astype(np.float32)) for name, array in wanted.items())
    assert call("convert", place / "dcp", place / "back", "--as", "hf").exit_code == 4
    ours = call_json("convert", root / STEP, place / "ours", "--as", "hf")
    assert ours["source"]["kind"] == "holdfast"
    assert (place / "ours" / "model.safetensors").read_bytes() == (place / "hf" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["missing", "out", "--as", "hf"], 2, "there is no directory or file missing"),
        (["hf", "out", "--as", "onnx"], 2, "cannot export"),
        (["hf", "hf/out", "--as", "hf"], 2, "inside the checkpoint"),
        (["hf", "s3://bucket/out", "--as", "hf"], 2, "is a URL"),
        (["hf", ".out", "--as", "hf"], 2, "hidden name"),
        (["hf", "out\nput", "--as", "hf"], 2, "non-printing"),
        (["hf", "out", "--as", "hf", "--from", "paper"], 2, "unknown kind 'paper'"),
        (["hf", "out", "--as", "peft"], 3, "no adapter"),
        (["odd", "out", "--as", "hf"], 2, "unknown.bin"),
        (["uncommitted", "out", "--as", "hf"], 2, naming.COMMIT),
        (["root/" + STEP, "out", "--as", "hf", "--as-is"], 2, "imported unchanged"),
    ],
)
def test_what_cannot_be_converted(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], status: int, says: str
) -> None:
    """It is named, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    assert call("export", "llama@5", "hf", "--as", "hf", "--root", root).exit_code == 0
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "unknown.bin.xyz").write_bytes(b"x")
    shutil.copytree(root / STEP, "uncommitted")
    (tmp_path / "uncommitted" / naming.COMMIT).unlink()
    before = sorted(os.listdir(tmp_path))
    said = call("convert", *words)
    assert said.exit_code == status and says in said.output.replace("\n", " "), said.output
    assert sorted(os.listdir(tmp_path)) == before and "out" not in os.listdir("hf")


def test_the_help_names_every_kind() -> None:
    assert export.KINDS.replace(" or ", ", ").split(", ") == list(EXPORT_KINDS)
