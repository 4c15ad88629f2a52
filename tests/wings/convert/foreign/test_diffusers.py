"""A pipeline of diffusers is read whole: a group a component, and every small file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from holdfast_formats.errors import CheckpointError, CorruptManifest, LimitExceeded, StateMismatch
from holdfast_formats.mapping.listing import ForeignListing
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.storage import hub_snapshot
from holdfast_service.wings.convert.foreign import diffusers
from holdfast_service.wings.convert.foreign.kinds import choose
from holdfast_service.wings.convert.foreign.known_kinds import KINDS
from tests.wings.convert.foreign.pipelines import UNET, pipeline


def read(top: Path, *leave_out: str) -> ForeignListing:
    return diffusers.KIND.read(hub_snapshot.opened(top), ReadOptions(leave_out=leave_out))


def test_all_components(tmp_path: Path) -> None:
    """Tensors in groups of their names, small files under names without a slash, and a use of every file."""
    top = pipeline(tmp_path / "pipeline")
    assert choose(hub_snapshot.opened(top), None, KINDS) is diffusers.KIND
    listing = read(top)
    assert sorted(listing.tensors) == [
        ("text_encoder", "layer.1.weight"),
        ("text_encoder", "layer.2.weight"),
        ("unet", "conv_in.weight"),
    ]
    assert listing.tensors[min(listing.tensors)].pieces[0].file.startswith("text_encoder/model-00001")
    assert sorted(listing.assets) == ["README.md", "model_index.json"]
    assert listing.made_assets["tokenizer.merges.txt"] == b"" and len(listing.made_assets) == 5
    files = {str(path.relative_to(top)) for path in top.rglob("*") if path.is_file()}
    assert {use.file for use in listing.files if "/" in use.file or use.use == "asset"} == files


def _shards_of_a_variant(top: Path) -> None:
    (top / "unet" / UNET).rename(top / "unet" / "diffusion_pytorch_model.fp16.safetensors")
    (top / "unet" / "diffusion_pytorch_model.safetensors.index.fp16.json").write_text("{}")


def test_one_precision_of_several(tmp_path: Path) -> None:
    """The file without a variant is taken; if there is only one with it, that one, and this is said."""
    top = pipeline(tmp_path / "pipeline")
    save_file({"conv_in.weight": np.ones(8, np.float16)}, top / "unet" / "diffusion_pytorch_model.fp16.safetensors")
    listing = read(top)
    assert {tensor.spec.dtype for key, tensor in listing.tensors.items() if key.group == "unet"} == {"F32"}
    assert "unet/diffusion_pytorch_model.fp16.safetensors" in {one.file for one in listing.files if one.use == "unused"}
    _shards_of_a_variant(top)
    alone = read(top)
    assert any("fp16.safetensors is read" in note for note in alone.notes) and len(alone.tensors) == 3


def _no_directory(top: Path) -> None:
    shutil.rmtree(top / "scheduler")


def _pickled(top: Path) -> None:
    (top / "unet" / UNET).rename(top / "unet" / "diffusion_pytorch_model.bin")


def _more_weights(top: Path) -> None:
    (top / "pytorch_lora_weights.safetensors").write_bytes(b"")


def _another_directory(top: Path) -> None:
    (top / "controlnet").mkdir()
    (top / "controlnet" / UNET).write_bytes(b"")


def _training(top: Path) -> None:
    (top / "unet" / "optimizer.bin").write_bytes(b"")


def _odd_name(top: Path) -> None:
    index = json.loads((top / "model_index.json").read_text())
    (top / "model_index.json").write_text(json.dumps({**index, "optim": ["diffusers", "UNet2DConditionModel"]}))
    (top / "optim").mkdir()


def _no_components(top: Path) -> None:
    (top / "model_index.json").write_text('{"unet": 3, "vae": [null, null], "_class_name": ["a", "b"]}')


def _two_names(top: Path) -> None:
    (top / "unet.json").write_text("{}")


def _cut(top: Path) -> None:
    file = top / "unet" / UNET
    file.write_bytes(file.read_bytes()[:-4])


@pytest.mark.parametrize(
    ("spoil", "says", "error"),
    [
        (_no_directory, "scheduler is missing", CorruptManifest),
        (_pickled, "unet/diffusion_pytorch_model.bin", StateMismatch),
        (_more_weights, "pytorch_lora_weights", StateMismatch),
        (_another_directory, "controlnet/diffusion", StateMismatch),
        (_training, "optimizer.bin", StateMismatch),
        (_odd_name, "'optim' cannot be a group", StateMismatch),
        (_no_components, "lists no component", CorruptManifest),
        (_two_names, "unet.json", StateMismatch),
        (_cut, "header describes", CorruptManifest),
    ],
)
def test_refused(tmp_path: Path, spoil: Callable[[Path], None], says: str, error: type[CheckpointError]) -> None:
    """By name, with a way on."""
    top = pipeline(tmp_path / "pipeline")
    spoil(top)
    with pytest.raises(error, match=says) as refused:
        read(top)
    assert refused.value.hint


def test_parts_are_left_out_by_name(tmp_path: Path) -> None:
    """A file of a component, or beside them, that is refused is left out by its path."""
    top = pipeline(tmp_path / "pipeline")
    tensors = read(top).tensors
    files = {"unet/optimizer.bin", "optimizer.pt"}
    for file in files:
        (top / file).write_bytes(b"1")
    with pytest.raises(StateMismatch) as refused:
        read(top)
    assert refused.value.hint == "go on without: --leave-out optimizer.pt --leave-out unet/optimizer.bin, or --weights-only"
    listing = read(top, *files)
    assert listing.tensors == tensors and {part.what for part in listing.left_out} == files


def test_small_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top = pipeline(tmp_path / "pipeline")
    monkeypatch.setattr(diffusers, "FILES_BYTES_MAX", 60)
    with pytest.raises(LimitExceeded, match="small files"):
        read(top)


def test_a_snapshot_of_the_hub(tmp_path: Path) -> None:
    """Links of files in directories are one level longer; no other length is followed."""
    top = pipeline(tmp_path / "pipeline")
    there, blobs = tmp_path / "models--a" / "snapshots" / "0123", tmp_path / "models--a" / "blobs"
    blobs.mkdir(parents=True)
    for number, file in enumerate(sorted(path for path in top.rglob("*") if path.is_file())):
        blob, link = f"{number:064x}", there / file.relative_to(top)
        file.rename(blobs / blob)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to("../" * len(link.relative_to(there.parent).parts) + f"blobs/{blob}")
    assert len(read(there).tensors) == 3
    target = (there / "unet" / UNET).readlink()
    (there / "unet" / UNET).unlink()
    (there / "unet" / UNET).symlink_to(f"../{target}")
    with pytest.raises(CheckpointError):
        read(there)
