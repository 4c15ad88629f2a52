"""Megatron's files by rank become one model, each element in its place; what no rule joins is refused or compared."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from holdfast_formats.errors import CheckpointError, CorruptExtent, StateMismatch
from holdfast_formats.mapping import equality
from holdfast_formats.mapping.listing import ForeignTensor
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.wings.convert.foreign.megatron_ranks import kinds as megatron_ranks
from tests.wings.convert.foreign.dcp.directories import DirectoryFiles, assert_same
from tests.wings.convert.foreign.megatron_ranks.ranks import WIDTH, change, read, saved


@pytest.mark.parametrize(("ranks", "stages", "chunks"), [(1, 1, 1), (2, 1, 1), (4, 2, 1), (1, 4, 1), (2, 2, 2)])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("deep", [True, False])
def test_the_whole_model(tmp_path: Path, ranks: int, stages: int, chunks: int, gated: bool, deep: bool) -> None:
    """Out of any number of ranks, stages and interleaved stages."""
    whole = saved(tmp_path, ranks, stages, gated, chunks, deep)
    listing = read(tmp_path)
    assert_same(tmp_path, listing, "model", whole)
    assert listing.step == 20 and listing.documents["extra"]["opt_param_scheduler"] == {"max_lr": 0.5}
    assert_same(tmp_path / "iter_0000020", read(tmp_path / "iter_0000020"), "model", whole)
    for tensor in listing.tensors.values():  # what several ranks hold is compared while it is copied
        if tensor.copies:
            other = ForeignTensor(tensor.spec, tensor.copies[:1])
            assert equality.equal(DirectoryFiles(tmp_path), tensor._replace(copies=()), other)


@pytest.mark.parametrize("gone", ["mp_rank_01_000", "mp_rank_00_001"])
def test_directories_of_the_last_ranks_are_missing(tmp_path: Path, gone: str) -> None:
    """Nothing but the arguments tells that the weights are not whole: not imported, unless the arguments are left out."""
    saved(tmp_path, 1 + ("01_" in gone), 1 + gone.endswith("1"))
    top = tmp_path / "iter_0000020"
    shutil.rmtree(top / (gone if (top / gone).exists() else gone.removesuffix("_000")))
    for options in ({}, {"weights_only": True}):
        with pytest.raises(StateMismatch, match="but there are directories") as refused:
            read(tmp_path, **options)
        assert "--leave-out args" in (refused.value.hint or "")
    assert read(tmp_path, leave_out=("args",)).tensors


def test_the_optimizer_is_refused(tmp_path: Path) -> None:
    """By its key, with the options that go on; so are random states, and files of the distributed optimizer."""
    more = {"optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}, "rng_state": [{"np_rng_state": ("MT", torch.ones(2))}]}
    whole = saved(tmp_path, 2, 1, **more)
    (tmp_path / "iter_0000020" / "mp_rank_00" / "distrib_optim.pt").write_bytes(b"")
    with pytest.raises(StateMismatch, match="optimizer") as refused:
        read(tmp_path)
    assert "--weights-only" in (refused.value.hint or "")
    listing = read(tmp_path, weights_only=True)
    assert_same(tmp_path, listing, "model", whole)
    assert {one.what for one in listing.left_out} >= {"optim/optimizer", "iter_0000020/mp_rank_00/distrib_optim.pt"}


def _replace(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    return lambda top: change(top, "mp_rank_01", lambda value: value["model"].update({name: tensor}))


def _no_rank(top: Path) -> None:
    (top / "iter_0000020" / "mp_rank_00").rename(top / "iter_0000020" / "mp_rank_02")


def _experts(top: Path) -> None:
    (top / "iter_0000020" / "mp_rank_00_000_001").mkdir()


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a rank is missing": (_no_rank, "not those of 3"),
    "expert parallelism": (_experts, "expert parallelism"),
    "another step": (lambda top: change(top, "mp_rank_01", lambda value: value.update(iteration=21)), "step 21"),
    "an old version": (
        lambda top: change(top, "mp_rank_00", lambda one: one.update(checkpoint_version=1.0)),
        "version",
    ),
    "another tensor": (_replace("more.weight", torch.ones(2)), "different tensors"),
    "a width": (_replace("output_layer.weight", torch.ones(8, 7)), "do not fit"),
    "a shape": (_replace("decoder.final_layernorm.weight", torch.ones(7)), "no rule"),
    "rows of an MLP": (_replace("decoder.layers.0.mlp.linear_fc1.weight", torch.ones(5, WIDTH)), "do not belong"),
    "no tensor": (lambda top: change(top, "mp_rank_00", lambda value: value["model"].update(x=3)), "no state dict"),
    "no model": (lambda top: change(top, "mp_rank_00", lambda value: value.pop("model")), "content that Megatron writes"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(tmp_path: Path, what: str) -> None:
    """By file and key, with the way on."""
    saved(tmp_path, 2, 1)
    spoil, says = REFUSED[what]
    spoil(tmp_path)
    with pytest.raises(CheckpointError, match=says) as refused:
        read(tmp_path)
    assert not isinstance(refused.value, CorruptExtent)


def test_no_ranks(tmp_path: Path) -> None:
    with pytest.raises(StateMismatch, match="mp_rank_00"):
        megatron_ranks.KIND.read(DirectoryFiles(tmp_path), ReadOptions())
