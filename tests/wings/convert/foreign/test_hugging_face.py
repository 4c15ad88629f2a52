"""An import takes the directory of a Hugging Face model, whole, and nothing that only looks like one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from holdfast_formats.errors import CorruptManifest, InvalidRequest, Refused, StateMismatch
from holdfast_formats.mapping.listing import ForeignListing
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.storage import hub_snapshot
from holdfast_service.wings.convert.foreign.hugging_face import KIND
from holdfast_service.wings.convert.foreign.kinds import choose
from holdfast_service.wings.convert.foreign.known_kinds import KINDS

WEIGHT = "model.layers.0.mlp.up_proj.weight"
ARRAYS = {WEIGHT: np.ones((4, 4), np.float32), "model.norm.weight": np.ones(4, np.float32)}


def a_model(directory: Path, **config: object) -> Path:
    """A model's directory as transformers leaves it, with what repositories have beside the weights."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "tiny", "torch_dtype": "float32", **config}))
    (directory / "tokenizer.json").write_text("{}")
    for copy in ("pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "tiny.Q4.gguf", "training_args.bin"):
        (directory / copy).write_bytes(b"the same again")
    save_file(ARRAYS, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def read(directory: Path) -> ForeignListing:
    """The model as an import reads it."""
    return KIND.read(hub_snapshot.opened(directory), ReadOptions())


def plan(directory: Path) -> set[str]:
    """The names of the tensors that would be imported, and of the files beside them."""
    made = read(directory)
    assert {use.file for use in made.files} == set(hub_snapshot.opened(directory).list(""))
    assert all(use.reason for use in made.files if use.use == "unused")
    return {key.name for key in made.tensors} | set(made.assets)


def test_a_model_is_taken(tmp_path: Path) -> None:
    """Its weights, and the files beside them; weights in other formats are left out."""
    assert plan(a_model(tmp_path / "a")) == {*ARRAYS, "config.json", "tokenizer.json"}


def test_every_file_has_a_use(tmp_path: Path) -> None:
    """Weights, assets, and the reason why any other is not used, a directory among them."""
    directory = a_model(tmp_path / "a")
    (directory / ".cache").mkdir()
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(ARRAYS, "model.safetensors")})
    )
    assert choose(hub_snapshot.opened(directory), None, KINDS) is KIND
    uses = {use.file: (use.use, use.reason) for use in read(directory).files}
    assert uses["model.safetensors"] == ("tensors", "") and uses["config.json"] == ("asset", "")
    assert "headers" in uses["model.safetensors.index.json"][1] and "directory" in uses[".cache"][1]
    assert uses["tf_model.h5"] == ("unused", "weights for another program: not compared, not imported")


@pytest.mark.parametrize(
    "name",
    [
        "optimizer.safetensors",
        "optimizer-00001-of-00002.safetensors",
        "Optimizer.PT",
        "more.BIN",
        "optimizer.safetensors.index.json",
        "optimizer.tp00.safetensors_shard_0001",
        "optimizer.pt",
        "optimizer_0",
        "optim.pt",
        "master_weights-00001-of-00001.safetensors",
        "master_weights.safetensors.index.json",
        "master_weight",
        "scheduler.pt",
        "scheduler.pdparams",
        "rng_state_0.pth",
        "random_states_0.pkl",
        "scaler.pt",
        "global_step100",
        "mp_rank_00",
        "iter_0000100",
        "pytorch_model_fsdp_0",
        "0_0.distcp",
        ".metadata",
        "0.metadata",
        "model.pdparams",
        "ema.safetensors",
        "something.ckpt",
        "pytorch_model_1.bin",
        "pytorch_model_ema.bin",
        "other.safetensors",
    ],
)
def test_what_would_be_left_out_is_refused(tmp_path: Path, name: str) -> None:
    """Optimizer, masters, whatever else trains, and weights that nothing explains: by the name of the file."""
    directory = a_model(tmp_path / "a")
    if name.endswith(".safetensors"):
        save_file({"extra": np.ones(2, np.float32)}, directory / name)
    else:
        (directory / name).write_bytes(b"")
    with pytest.raises(StateMismatch) as caught:
        plan(directory)
    assert name in str(caught.value) and caught.value.hint


def _bfloat16_as_integers(directory: Path) -> None:
    (directory / "config.json").write_text('{"torch_dtype": "bfloat16"}')
    save_file({WEIGHT: np.ones((4, 4), np.uint16)}, directory / "model.safetensors", metadata={"format": "pt"})


def _turned_round(directory: Path) -> None:
    save_file(ARRAYS, directory / "model.safetensors", metadata={"format": "np"})


def _an_entry_without_a_tensor(directory: Path) -> None:
    entries = dict.fromkeys([*ARRAYS, "nowhere"], "model.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": entries}))


def _an_adapter(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "adapter_model.safetensors")


def _a_shard_is_gone(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "model-00001-of-00003.safetensors")
    save_file({"extra": np.ones(2, np.float32)}, directory / "model-00002-of-00003.safetensors")


def _one_shard_is_left(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "model-00001-of-00003.safetensors")


def _odd_config(directory: Path) -> None:
    (directory / "config.json").write_text("[]")


@pytest.mark.parametrize(
    ("spoil", "says", "error"),
    [
        (_bfloat16_as_integers, "bfloat16", StateMismatch),
        (_turned_round, "transposed", StateMismatch),
        (_an_entry_without_a_tensor, "nowhere", StateMismatch),
        (_an_adapter, "adapter", StateMismatch),
        (_a_shard_is_gone, "no index", StateMismatch),
        (_one_shard_is_left, "one of several files", StateMismatch),
        (_odd_config, "config.json", CorruptManifest),
    ],
)
def test_what_is_not_understood_is_refused(
    tmp_path: Path, spoil: Callable[[Path], None], says: str, error: type[Exception]
) -> None:
    """Weights that would load wrong are never committed; the refusal says which and why."""
    directory = a_model(tmp_path / "a")
    spoil(directory)
    with pytest.raises(error, match=says):
        plan(directory)


def test_all_shards_without_an_index_are_one_model(tmp_path: Path) -> None:
    """Numbered files that are all there need no index."""
    directory = a_model(tmp_path / "a")
    (directory / "model.safetensors").unlink()
    for number, (name, array) in enumerate(ARRAYS.items(), 1):
        save_file({name: array}, directory / f"model-0000{number}-of-00002.safetensors")
    assert set(ARRAYS) <= plan(directory)


def _as_snapshot(cache: Path, model: Path) -> Path:
    """The model as huggingface_hub keeps it: blobs, and a snapshot of links to them."""
    there = cache / "models--org--tiny" / "snapshots" / "0123abc"
    blobs = there.parent.parent / "blobs"
    there.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(model.iterdir())):
        blob = f"{number:064x}"
        file.rename(blobs / blob)
        (there / file.name).symlink_to(f"../../blobs/{blob}")
    return there


def test_a_snapshot_of_the_hub_is_taken(tmp_path: Path) -> None:
    """Its files are links to blobs beside it, and these are followed."""
    there = _as_snapshot(tmp_path / "hub", a_model(tmp_path / "a"))
    assert plan(there) == {*ARRAYS, "config.json", "tokenizer.json"}


@pytest.mark.parametrize(
    "target", ["../../../secret.safetensors", "/etc/passwd", "../../blobs/../refs/main", "../../blobs/link"]
)
def test_no_other_link_of_a_snapshot_is_followed(tmp_path: Path, target: str) -> None:
    """A link that leads anywhere but to a blob, or to a blob that is a link itself, is no file."""
    there = _as_snapshot(tmp_path / "hub", a_model(tmp_path / "a"))
    save_file(ARRAYS, tmp_path / "hub" / "secret.safetensors")
    blob = there.parent.parent / "blobs" / ("f" * 64)
    blob.symlink_to("../../secret.safetensors")
    (there / "model.safetensors").unlink()
    (there / "model.safetensors").symlink_to("../../blobs/" + "f" * 64 if target.endswith("link") else target)
    with pytest.raises((InvalidRequest, Refused)):
        plan(there)
