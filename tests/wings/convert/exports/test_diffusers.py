"""A pipeline that was imported is written again as the directory that diffusers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from holdfast_formats import naming
from holdfast_formats.disk.packing import pack
from holdfast_formats.errors import CheckpointError, InvalidRequest, NoSuchResource
from holdfast_formats.rest.jobs import ExportTerms
from holdfast_formats.rest.offline import RootJob
from holdfast_service.daemon.copying.progress import Quiet
from holdfast_service.offline.__main__ import main
from holdfast_service.wings.convert import offline
from holdfast_service.wings.convert.exports import diffusers, safetensors_files
from holdfast_service.wings.convert.exports.plan import ExportOptions
from holdfast_service.wings.convert.foreign_export import planned_of
from tests.job_requests import a_conversion, an_import
from tests.wings.convert.exports.sources import made
from tests.wings.convert.foreign.pipelines import pipeline

INDEX = b'{"unet": ["diffusers", "UNet2DConditionModel"]}'


def contents(top: Path) -> dict[str, Any]:
    """The small files to the byte, and the arrays of each directory."""
    files = {str(path.relative_to(top)): path for path in top.rglob("*") if path.is_file()}
    small: dict[str, Any] = {name: path.read_bytes() for name, path in files.items() if path.suffix != ".safetensors"}
    for name, path in files.items():
        if path.suffix == ".safetensors":
            held = {key: (array.dtype, array.tobytes()) for key, array in load_file(path).items()}
            small.setdefault(name.partition("/")[0], {}).update(held)
    return small


def convert(source: Path, target: Path) -> None:
    offline.convert(a_conversion(source=str(source), to=str(target), form="diffusers"), Quiet())


def test_the_same_directory(tmp_path: Path) -> None:
    """Out of a checkpoint, and straight from the source."""
    source, root = pipeline(tmp_path / "source"), tmp_path / "root"
    job = an_import("p", 1, **{"from": str(source)})
    assert main(RootJob(root=str(root), job=job).model_dump_json(by_alias=True)) == 0
    convert(root / naming.checkpoint_path("p", 1), tmp_path / "one")
    convert(source, tmp_path / "two")
    assert contents(tmp_path / "one") == contents(tmp_path / "two") == contents(source)
    assert (tmp_path / "one" / "unet" / "diffusion_pytorch_model.safetensors").is_file()
    assert (tmp_path / "one" / "text_encoder" / "model.safetensors").is_file()


def test_large_components_have_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In files of the names that both libraries write."""
    monkeypatch.setattr(safetensors_files, "pack", lambda specs, most: pack(specs, 8))
    convert(pipeline(tmp_path / "source"), tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out" / "text_encoder").iterdir())
    assert names == ["config.json", *(f"model-0000{n}-of-00002.safetensors" for n in (1, 2)), "model.safetensors.index.json"]


@pytest.mark.parametrize(
    "options",
    [ExportOptions(dtype="F16"), ExportOptions(layout="plain"), ExportOptions(weights="ema")],
    ids=["dtype", "layout", "weights"],
)
def test_options_that_do_not_apply(tmp_path: Path, options: ExportOptions) -> None:
    source = made(tmp_path / "step", {"unet": {"w": np.ones(2, np.float32)}}, assets={"model_index.json": INDEX}).source
    with pytest.raises(InvalidRequest, match="pipeline"):
        diffusers.plan(source, options)


@pytest.mark.parametrize(
    ("group", "assets"), [("unet", {}), ("model", {"model_index.json": INDEX})], ids=["no index", "no component"]
)
def test_what_is_no_pipeline(tmp_path: Path, group: str, assets: dict[str, bytes]) -> None:
    source = made(tmp_path / "step", {group: {"w": np.ones(2, np.float32)}}, assets=assets).source
    with pytest.raises(NoSuchResource, match="checkpoint has no") as refused:
        diffusers.plan(source, ExportOptions())
    assert "--as hf" in refused.value.hint


def test_a_single_component(tmp_path: Path) -> None:
    """Is committed as diffusers loads it: what asks for anything else leads to an export as it is."""
    held = made(tmp_path / "step", {"diffusion_pytorch_model": {"w": np.ones(2, np.float32)}}, assets={})
    for form in ("diffusers", "hf", "dcp"):
        with pytest.raises(CheckpointError) as refused:
            planned_of(held.source, held.source.files, ExportTerms(**{"as": form}))
        assert "leave --as out" in refused.value.hint or "leave it out" in refused.value.hint


def test_an_index_that_is_none(tmp_path: Path) -> None:
    arrays = {"unet": {"w": np.ones(2, np.float32)}}
    with pytest.raises(CheckpointError, match="model_index"):
        diffusers.plan(made(tmp_path / "step", arrays, assets={"model_index.json": b"{"}).source, ExportOptions())


def test_other_groups_are_listed(tmp_path: Path) -> None:
    """What is no component of the pipeline is left out, and this is said."""
    arrays = {"unet": {"w": np.ones(2, np.float32)}, "optim": {"w/exp_avg": np.ones(2, np.float32)}}
    plan = diffusers.plan(made(tmp_path / "step", arrays, assets={"model_index.json": INDEX}).source, ExportOptions())
    assert ["optim" in one.what for one in plan.left_out] == [True]
