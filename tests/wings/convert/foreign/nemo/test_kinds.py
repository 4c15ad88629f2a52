"""NeMo's archives, packed and unpacked, and the directories of NeMo 2."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast_formats.errors import CheckpointError, StateMismatch
from holdfast_formats.mapping import reading
from holdfast_formats.mapping.listing import TensorKey
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.wings.convert.foreign.kinds import choose
from holdfast_service.wings.convert.foreign.known_kinds import KINDS
from holdfast_service.wings.convert.foreign.nemo import kinds
from holdfast_service.wings.convert.sources import open_below, open_source
from tests.wings.convert.foreign.dcp.directories import DirectoryFiles, assert_same, bytes_of
from tests.wings.convert.foreign.dcp.saving import save_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*TypedStorage:UserWarning")

TOKENIZER = f"{'0a' * 16}_tokenizer.model"
STATE = {"encoder.weight": torch.arange(12.0).reshape(3, 4).bfloat16(), "encoder.bias": torch.tensor([1.5, -2.5])}


def unpacked(top: Path) -> Path:
    """What `SaveRestoreConnector.save_to` of NeMo 1 and 2 puts into an archive."""
    top.mkdir()
    (top / "model_config.yaml").write_text("target: nemo.X\n")
    (top / TOKENIZER).write_bytes(b"sentencepiece")
    return top


def of_torch(top: Path, **more: Any) -> Path:
    torch.save({**STATE, **more}, unpacked(top) / "model_weights.ckpt")
    return top


def of_megatron(top: Path, name: str = "model_weights", backend: str = "torch_dist") -> Path:
    (unpacked(top) / name).mkdir()
    save_ranks(top / name, [{f"model.{key}": value for key, value in STATE.items()}])
    (top / name / "metadata.json").write_text(json.dumps({"sharded_backend": backend, "sharded_backend_version": 1}))
    torch.save({"iteration": 3}, top / name / "common.pt")
    return top


def packed(top: Path, mode: str) -> Path:
    """The archive of a directory, as NeMo writes it: plain, or compressed by older releases."""
    archive = top.with_name("m.nemo")
    with tarfile.open(archive, mode) as tar:  # type: ignore[call-overload]
        tar.add(top, arcname=".")
    return archive


@pytest.mark.parametrize("mode", ["w:", "w:gz", ""], ids=["plain", "gzip", "directory"])
@pytest.mark.parametrize("make", [of_torch, of_megatron])
def test_an_archive(tmp_path: Path, make: Any, mode: str) -> None:
    """Its weights are exact, in whatever form they are; the configuration and the tokenizer are kept."""
    top = make(tmp_path / "model")
    files = open_source(packed(top, mode) if mode else top)
    listing = choose(files, None, KINDS).read(files, ReadOptions())
    assert listing.kind == "nemo" and listing.assets == (TOKENIZER, "model_config.yaml")
    assert {key.name for key in listing.tensors} == set(STATE)
    for name, value in STATE.items():
        assert reading.fetched(files, listing.tensors[TensorKey("model", name)]).tobytes() == bytes_of(value)
    assert listing.step == (3 if make is of_megatron else None)
    assert {use.file for use in listing.files if use.use == "unused"} == set()


def test_an_archive_below_the_export_root(tmp_path: Path) -> None:
    packed(of_torch(tmp_path / "model"), "w:")
    files = open_below(tmp_path, "m.nemo")
    assert files.list("") == [TOKENIZER, "model_config.yaml", "model_weights.ckpt"]


def test_what_else_is_in_an_archive(tmp_path: Path) -> None:
    """Entries of other classes and other files with tensors are refused by name, and can be left out."""
    top = of_torch(tmp_path / "model", code=print)
    torch.save({}, top / "ema.ckpt")
    files = open_source(packed(top, "w:"))
    with pytest.raises(StateMismatch) as refused:
        kinds.KIND.read(files, ReadOptions())
    assert "--leave-out ema.ckpt --leave-out code" in (refused.value.hint or "")
    listing = kinds.KIND.read(files, ReadOptions(leave_out=("ema.ckpt", "code")))
    assert {part.what for part in listing.left_out} == {"ema.ckpt", "code"} and len(listing.tensors) == 2


@pytest.mark.parametrize(
    ("make", "said", "hint"),
    [
        (lambda top: of_megatron(top, backend="zarr"), "its format is 'zarr'", "dist_ckpt_format: torch_dist"),
        (lambda top: of_megatron(top, "tp_rank_00_pp_rank_000"), "one rank's part", "megatron_change_num_partitions.py"),
        (lambda top: of_megatron(top, "mp_rank_01"), "one rank's part", "--target_tensor_model_parallel_size=1"),
        (unpacked, "neither model_weights.ckpt nor model_weights/", "save_to"),
    ],
    ids=["zarr", "ranks", "tensor ranks", "no weights"],
)
def test_what_is_refused(tmp_path: Path, make: Any, said: str, hint: str) -> None:
    """With the way on in NeMo."""
    files = DirectoryFiles(make(tmp_path / "model"))
    with pytest.raises(CheckpointError, match=said) as refused:
        kinds.KIND.read(files, ReadOptions())
    assert hint in (refused.value.hint or "")


def test_nemo_2(tmp_path: Path) -> None:
    """torch_dist in weights/, with `module.` before the names, and the model's configuration in context/."""
    weights = tmp_path / "weights"
    weights.mkdir()
    state = {
        "module.output_layer.weight": torch.ones(2),
        "optimizer.state.exp_avg.module.output_layer.weight": torch.zeros(2),
    }
    save_ranks(weights, [state])
    (weights / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    torch.save({"global_step": 5, "optimizer": [{"param_groups": [{"step": 5}]}]}, weights / "common.pt")
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "model.yaml").write_text("_target_: x\n")
    files = DirectoryFiles(tmp_path)
    assert choose(files, None, KINDS) is kinds.KIND
    listing = kinds.read(files, ReadOptions())
    assert_same(tmp_path, listing, "model", {"output_layer.weight": torch.ones(2)})
    steps = {"output_layer.weight/exp_avg": torch.zeros(2), "output_layer.weight/step": torch.tensor(5.0)}
    assert_same(tmp_path, listing, "optim", steps)
    assert listing.step == 5
    assert {use.file: use.use for use in listing.files} == {
        "context/model.yaml": "unused",
        "weights/.metadata": "state",
        "weights/__0_0.distcp": "tensors",
        "weights/common.pt": "state",
        "weights/metadata.json": "state",
    }
