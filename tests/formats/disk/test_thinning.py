"""What stays of a checkpoint when it is thinned, and what its manifest says then."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from holdfast.read.reader import CheckpointReader
from holdfast.read.sources import DirectorySource
from holdfast_formats import naming
from holdfast_formats.disk import manifests
from holdfast_formats.disk.thinning import can_be_thinned, thin, thin_bytes
from holdfast_formats.errors import CorruptManifest, StateMismatch
from holdfast_formats.rest import bodies
from tests.checkpoints import Built, build, varied_arrays
from tests.in_memory import tmp_path

__all__ = ["tmp_path"]
AT = "2030-01-01T00:00:00.000Z"


def parts(built: Built) -> tuple[manifests.Manifest, bytes, bytes]:
    return built.manifest, (built.path / naming.MANIFEST).read_bytes(), (built.path / naming.STATE).read_bytes()


def test_weights_and_assets_stay_as_they_are(tmp_path: Path) -> None:
    """Files, extents and digests are the same; optimizer, masters and state of ranks are gone, with their JSON."""
    built = build(tmp_path / "full", {**varied_arrays(), "master": {"w": np.ones(5, np.float32)}, "ema": {"w": np.ones(5)}})
    done = thin(*parts(built), AT)
    assert done.manifest.groups == ("model", "ema")
    assert done.manifest.tensors == {group: built.manifest.tensors[group] for group in ("model", "ema")}
    assert set(done.stays) <= set(built.manifest.files)
    names = {entry.name for entry in done.manifest.files}
    assert {"config.json", "empty.txt", "model.safetensors.index.json", naming.STATE} <= names
    assert not [name for name in names if name.startswith(("optim", "master", "extra"))]
    assert json.loads(done.state)["groups"] == {"model": {}, "ema": {}}
    assert json.loads(done.state)["metrics"] == {"loss": 2.5}
    assert done.manifest.thinned is not None and done.manifest.thinned.groups == ("extra", "master", "optim")
    assert done.manifest.thinned.bytes == built.manifest.bytes > done.manifest.bytes
    assert manifests.stated_sha256((built.path / naming.COMMIT).read_bytes()) == done.manifest.thinned.manifest_sha256
    foreseen = thin_bytes(built.manifest)
    assert foreseen is not None and 0 <= foreseen - done.manifest.bytes < 200  # state.json has become shorter


def test_what_is_written_so_is_a_checkpoint(tmp_path: Path) -> None:
    """A reader that knows nothing of thinning proves every byte of it."""
    built = build(tmp_path / "full")
    done = thin(*parts(built), AT)
    there = tmp_path / "thin"
    there.mkdir()
    for entry in done.stays:
        (there / entry.name).write_bytes((built.path / entry.name).read_bytes())
    (there / naming.STATE).write_bytes(done.state)
    encoded = manifests.encode(done.manifest)
    (there / naming.MANIFEST).write_bytes(encoded)
    (there / naming.COMMIT).write_bytes(manifests.encode_commit(done.manifest, encoded))
    with CheckpointReader.open(DirectorySource(there)) as reader:
        assert reader.verify() == []
        assert np.array_equal(reader.read("model", "layers.0.q.weight"), built.arrays["model"]["layers.0.q.weight"])
        assert reader.manifest == done.manifest
    described = bodies.describe(done.manifest)
    assert described.thin_bytes is None and described.thinned is not None
    assert described.thinned.groups == ["extra", "optim"]
    with pytest.raises(StateMismatch, match="nothing to remove"):
        thin(done.manifest, encoded, done.state, AT)


@pytest.mark.parametrize("held", [("optim", "extra"), ("model",), ("model", "ema", "adapter"), ()])
def test_what_cannot_be_thinned_is_refused(tmp_path: Path, held: tuple[str, ...]) -> None:
    """Where nothing would go, or no weights would stay."""
    arrays = {group: {"w": np.ones(3, np.float32)} for group in held}
    built = build(tmp_path / "full", arrays, ranks={0: {}})
    assert thin_bytes(built.manifest) is None and not can_be_thinned(held)
    with pytest.raises(StateMismatch):
        thin(*parts(built), AT)


def test_a_model_without_tensors_stays_whole(tmp_path: Path) -> None:
    """What remains has to be weights."""
    built = build(tmp_path / "full", {"model": {}, "optim": {"w": np.ones(3)}}, ranks={0: {}})
    with pytest.raises(StateMismatch, match="no weights"):
        thin(*parts(built), AT)


def test_files_of_two_groups_are_refused_by_name(tmp_path: Path) -> None:
    """No writer of ours makes them. Of such a file half would have to go."""
    built = build(tmp_path / "full", {"model": {"a": np.ones(3)}, "optim": {"b": np.ones(3)}}, ranks={0: {}})
    full, encoded, state = parts(built)
    shared = {**full.tensors, "model": {"a": msgspec.structs.replace(full.tensors["model"]["a"], file="optim.safetensors")}}
    with pytest.raises(
        StateMismatch, match=r"optim\.safetensors of tiny@5 holds both tensors to keep and tensors to remove"
    ):
        thin(msgspec.structs.replace(full, tensors=shared), encoded, state, AT)


@pytest.mark.parametrize(
    "wrong", [{"groups": ("model",)}, {"groups": ()}, {"bytes": 1}, {"manifest_sha256": "x"}, {"groups": ("No",)}]
)
def test_a_manifest_that_contradicts_itself_is_refused(tmp_path: Path, wrong: dict) -> None:
    made = thin(*parts(build(tmp_path / "full")), AT).manifest
    assert made.thinned is not None
    with pytest.raises(CorruptManifest):
        manifests.encode(msgspec.structs.replace(made, thinned=msgspec.structs.replace(made.thinned, **wrong)))
