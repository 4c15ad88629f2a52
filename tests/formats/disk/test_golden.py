"""The golden checkpoint of format 1: committed once, and readable for ever."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import safetensors as library
import torch

from holdfast_formats import dtypes, naming
from holdfast_formats.digest import digest
from holdfast_formats.disk import manifests, safetensors, state_json, verification
from holdfast_formats.disk.manifests import Manifest

ROOT = Path(__file__).parents[2] / "golden"
DIRECTORY = ROOT / "v1/golden/checkpoints/step-00000500"
SHA256 = "b3b669d8599a284e2d2ef744553df84280e2f52cca1dfe3c600e062f4e83fa2c"

# What was saved, written down by hand: name -> (dtype, shape, values as floats).
EXPECTED: dict[str, dict[str, tuple[str, tuple[int, ...], list[float]]]] = {
    "model": {
        "embed.weight": ("BF16", (8, 4), [-4.0 + 0.25 * i for i in range(32)]),
        "layers.2.weight": ("F32", (3, 5), [0.5 + 0.125 * i for i in range(15)]),
        "layers.10.weight": ("F8_E4M3", (4, 4), [-2.0 + 0.25 * i for i in range(16)]),
        "mask": ("BOOL", (5,), [0, 1, 1, 1, 1]),
        "counts": ("I64", (2,), [1099511627776, 1099511627777]),
        "scale": ("F32", (), [0.75]),
        "nothing": ("F32", (0, 3), []),
    },
    "optim": {
        "embed.weight.exp_avg": ("F32", (8, 4), [0.5 * i for i in range(32)]),
        "embed.weight.step": ("F32", (), [500.0]),
    },
    "master": {"embed.weight": ("F32", (8, 4), [-4.0 + 0.25 * i for i in range(32)])},
    "ema": {"embed.weight": ("F16", (8, 4), [-3.0 + 0.25 * i for i in range(32)])},
    "extra": {"rng.cpu": ("U8", (16,), [1, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31, 34, 37, 40, 43, 46])},
}


@pytest.fixture(scope="module")
def made() -> Manifest:
    return manifests.decode((DIRECTORY / naming.MANIFEST).read_bytes(), (DIRECTORY / naming.COMMIT).read_bytes())


@pytest.fixture(scope="module")
def make_golden() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_golden", ROOT / "make_golden.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_the_checkpoint_that_was_committed() -> None:
    """The manifest proves every other byte, so its own digest shows that nobody has written the golden checkpoint again."""
    assert hashlib.sha256((DIRECTORY / naming.MANIFEST).read_bytes()).hexdigest() == SHA256
    assert naming.parse_step_directory(DIRECTORY.name) == 500
    assert json.loads((ROOT / "v1/golden" / naming.RUN_FILE).read_bytes()) == {
        "format": 1,
        "keep_last": 3,
        "pins": [500],
        "labels": {"best": [500]},
    }


def test_the_manifest_says_what_was_saved(made: Manifest) -> None:
    """Run, step, groups, tensors, metrics and the tied weights are what they were."""
    assert (made.format, made.run, made.step, made.attempt, made.world) == (1, "golden", 500, 2, 2)
    assert made.created == "2026-01-02T03:04:05Z"
    assert (made.metrics, made.mesh) == ({"loss": 2.5}, {"dp": 2})
    assert made.aliases == {"model": {"lm_head.weight": "embed.weight"}}
    held = {group: {n: (t.dtype, t.shape) for n, t in tensors.items()} for group, tensors in made.tensors.items()}
    assert held == {group: {n: (d, s) for n, (d, s, _) in tensors.items()} for group, tensors in EXPECTED.items()}


def test_every_byte_is_proven(made: Manifest) -> None:
    """The directory holds the manifest's files, COMMIT and the manifest; every piece of every file has its digest."""
    listed = {file.name for file in made.files}
    assert {path.name for path in DIRECTORY.iterdir()} == listed | {naming.COMMIT, naming.MANIFEST}
    for name, pieces in verification.pieces(made).items():
        data = (DIRECTORY / name).read_bytes()
        assert b"".join(data[piece.start : piece.stop] for piece in pieces) == data
        assert all(digest(data[piece.start : piece.stop]) == piece.digest for piece in pieces)
    assert len(made.tensors["model"]["embed.weight"].extents) == 2


def test_headers_and_indexes_agree_with_the_manifest(made: Manifest) -> None:
    """Each header states the tensors where the manifest does, at 4 KiB; each index sends them to their files."""
    tensors = verification.tensors_by_file(made)
    for name, expected in tensors.items():
        verification.check_header(made.file(name), expected, (DIRECTORY / name).read_bytes())
        assert made.file(name).header_bytes == safetensors.DATA_ALIGNMENT_BYTES
    for group in made.groups:
        index = json.loads((DIRECTORY / naming.index_file_name(group)).read_bytes())
        assert index["weight_map"] == {name: tensor.file for name, tensor in made.tensors[group].items()}
        assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in made.tensors[group].values())}


def test_values_are_what_they_were(made: Manifest) -> None:
    """numpy on the bare bytes finds the numbers that were written."""
    for group, tensors in EXPECTED.items():
        for name, (dtype, shape, expected) in tensors.items():
            entry = made.tensors[group][name]
            data = (DIRECTORY / entry.file).read_bytes()[entry.start : entry.start + entry.nbytes]
            array = np.frombuffer(data, dtypes.to_numpy(dtype)).reshape(shape)
            assert array.astype(np.float64).reshape(-1).tolist() == expected, name


def test_the_library_reads_every_file(made: Manifest) -> None:
    """safe_open gives torch the same numbers, and transformers the metadata that it asks for."""
    seen = 0
    for name, tensors in verification.tensors_by_file(made).items():
        group = name.split("-")[0].split(".")[0]
        with library.safe_open(DIRECTORY / name, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert set(opened.keys()) == set(tensors)
            for tensor in tensors:
                loaded: Any = opened.get_tensor(tensor)
                assert (tuple(loaded.shape), loaded.to(torch.float64).reshape(-1).tolist()) == EXPECTED[group][tensor][1:]
                seen += 1
    assert seen == sum(map(len, EXPECTED.values()))


def test_state_and_assets_are_what_they_were() -> None:
    """What ranks agreed on and what they did not comes back, also to a rank of a larger world."""
    encoded = (DIRECTORY / naming.STATE).read_bytes()
    scheduler = {"best": {"$float": "inf"}, "last_lr": [0.001], "name": "余弦"}
    for rank, position in [(0, 1000), (1, 1001), (2, 1000), (7, 1001)]:
        restored = state_json.for_rank(encoded, rank)
        assert {key: json.loads(text) for key, text in restored.values["extra"].items()} == {
            "loader": {"position": position, "shuffled": True},
            "scheduler": scheduler,
        }
        assert restored.remapped == (("extra/loader",) if rank > 1 else ())
        assert json.loads(restored.values["optim"]["param_groups"]) == [{"betas": [0.9, 0.999], "lr": 0.001}]
    assert json.loads(encoded)["metrics"] == {"loss": 2.5}
    assert json.loads((DIRECTORY / "config.json").read_bytes()) == {"architectures": ["GoldenModel"], "hidden_size": 4}


def test_the_same_tensors_still_give_the_same_files(make_golden: ModuleType, tmp_path: Path) -> None:
    """Shard files are canonical: today's formats write the same bytes, and the script never overwrites."""
    make_golden.write(tmp_path / "again")
    for path in DIRECTORY.glob("*.safetensors"):
        assert (tmp_path / "again" / path.relative_to(ROOT / "v1")).read_bytes() == path.read_bytes()
    with pytest.raises(FileExistsError):
        make_golden.write(tmp_path / "again")
