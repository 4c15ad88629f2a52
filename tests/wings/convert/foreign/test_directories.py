"""Directories and links in a foreign checkpoint: of no matter and named with a reason, or refused with what is in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast_formats.errors import StateMismatch
from holdfast_service.wings.convert.foreign.directories import LEVELS_MAX, LISTED_MAX, why_unused
from tests.wings.convert.foreign.directories import OnDisk


@pytest.mark.parametrize(
    "path",
    [
        "other/adapter_model.safetensors",  # a second adapter of PEFT
        "2_Dense/model.safetensors",  # a layer of sentence-transformers
        "pytorch_model/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",  # accelerate with DeepSpeed
        "optimizer_0/.metadata",
        "ema/0/1/rank.pkl",
        "masters/a.pdparams",
    ],
)
def test_one_with_tensors_is_refused(tmp_path: Path, path: str) -> None:
    """By the file's path, some levels deep."""
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_bytes(b"x")
    with pytest.raises(StateMismatch, match="is in a directory") as caught:
        why_unused(OnDisk(tmp_path), path.partition("/")[0])
    assert str(caught.value).startswith(path)


def test_what_is_of_no_matter(tmp_path: Path) -> None:
    """Other steps, caches, copies for other programs, and what has no tensors, each with its reason."""
    for name in ("checkpoint-500", "original", ".cache", "runs", "deep/1/2/3/4"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x.json").write_bytes(b"x")
    for name in ("checkpoint-500", "original", ".cache"):
        (tmp_path / name / "model.safetensors").write_bytes(b"x")
    (tmp_path / "deep/1/2/3/4/model.bin").write_bytes(b"x")
    assert LEVELS_MAX == 3
    files = OnDisk(tmp_path)
    assert "separate checkpoint" in why_unused(files, "checkpoint-500")
    assert "not compared" in why_unused(files, "original")
    assert "hidden" in why_unused(files, ".cache")
    assert (
        "nor a directory with tensors" in why_unused(files, "runs") == why_unused(files, "deep") == why_unused(files, "link")
    )


def test_a_link_in_place_of_tensors(tmp_path: Path) -> None:
    """A link that is not followed is refused by a name of tensors."""
    with pytest.raises(StateMismatch, match=r"rng_state_0\.pth is not a regular file"):
        why_unused(OnDisk(tmp_path), "rng_state_0.pth")


def test_very_many_names(tmp_path: Path) -> None:
    """The look at a directory ends: one with too many names is refused."""
    (tmp_path / "many").mkdir()
    for number in range(LISTED_MAX + 1):
        (tmp_path / "many" / str(number)).touch()
    with pytest.raises(StateMismatch, match="is in a directory"):
        why_unused(OnDisk(tmp_path), "many")
