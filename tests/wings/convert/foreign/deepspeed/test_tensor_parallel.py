"""Checkpoints of ZeRO with tensor parallelism become whole tensors by the rules that they contain, or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping import equality
from holdfast_formats.mapping.listing import ForeignListing, ForeignTensor
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.wings.convert.foreign.deepspeed.kinds import KIND
from tests.wings.convert.foreign.dcp.directories import DirectoryFiles, assert_same

Tensors = dict[str, torch.Tensor]
WORDS, KINDS = 7, ("exp_avg", "exp_avg_sq")
SHAPES = {"words": (8, 3), "norm": (3,), "mean": (3,), "gated": (12, 3), "second": (3, 6), "rows": (4, 5)}
INFO: dict[str, Any] = {
    "universal_checkpoint_version": 0.2,
    "tp_replicated_parameter_patterns": [r"norm$"],
    "parameter_to_average_patterns": ["mean"],
    "parameter_with_row_parallelism_patterns": [r".*econd"],
    "parameter_with_2_sub_params_cat_dim_0": ["gated"],
    "vocabulary_parameter_patterns": [r"words"],
    "original_vocab_size": WORDS,
}


def part(name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """What a rank of two has of a tensor."""
    if name in ("norm", "mean", "seen"):
        return tensor.clone()
    if name == "gated":
        return torch.cat([half.chunk(2)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(2, 1 if name == "second" else 0)[rank].clone()


def saved(top: Path, dtype: torch.dtype = torch.bfloat16, **model: Any) -> tuple[Tensors, dict[str, Tensors]]:
    """Two ranks of tensor parallelism with ZeRO 2 on one rank of data each: the masters and the moments."""
    torch.manual_seed(3)
    masters = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    moments = {kind: {name: torch.rand(shape) for name, shape in SHAPES.items()} for kind in KINDS}
    (top / "global_step3").mkdir(parents=True)
    (top / "latest").write_text("global_step3")
    for rank in range(2):
        local = {name: part(name, one, rank) for name, one in masters.items()}

        def flat(held: Tensors, rank: int = rank) -> torch.Tensor:
            return torch.cat([part(name, one, rank).flatten() for name, one in held.items()])

        state = {"module": {**{name: one.to(dtype) for name, one in local.items()}, "seen": torch.ones(2)}}
        about = {"buffer_names": ["seen"], "param_shapes": [{name: one.shape for name, one in local.items()}]}
        counters = {"global_steps": 3, "mp_world_size": 2, "dp_world_size": 1, "universal_checkpoint_info": INFO}
        torch.save({**state, **about, **counters, **model}, top / f"global_step3/mp_rank_{rank:02}_model_states.pt")
        inner = {"step": torch.tensor(5.0), **{kind: flat(held) for kind, held in moments.items()}}
        base = {"state": {0: inner}, "param_groups": [{"lr": 0.5, "params": [0]}]}
        flats = {"single_partition_of_fp32_groups": [flat(masters)], "zero_stage": 2, "partition_count": [1]}
        optimizer = {"optimizer_state_dict": {"base_optimizer_state": base, **flats}}
        torch.save(optimizer, top / f"global_step3/zero_pp_rank_0_mp_rank_{rank:02}_optim_states.pt")
    return masters, moments


def read(top: Path) -> ForeignListing:
    return KIND.read(DirectoryFiles(top), ReadOptions())


def unpadded(held: Tensors) -> Tensors:
    return {name: one[:WORDS] if name == "words" else one for name, one in held.items()}


def test_as_universal(tmp_path: Path) -> None:
    """By rows, columns and halves, without rows that pad the vocabulary; what all ranks have is compared."""
    masters, moments = saved(tmp_path)
    listing = read(tmp_path)
    weights = {name: one.bfloat16() for name, one in unpadded(masters).items()}
    assert_same(tmp_path, listing, "model", {**weights, "seen": torch.ones(2)})
    assert_same(tmp_path, listing, "master", unpadded(masters))
    named = {f"{name}/{kind}": one for kind, held in moments.items() for name, one in unpadded(held).items()}
    assert_same(tmp_path, listing, "optim", {**named, **{f"{name}/step": torch.tensor(5.0) for name in SHAPES}})
    copied = {key.name for key, one in listing.tensors.items() if key.group == "model" and one.copies}
    assert copied == {"norm", "mean", "seen"}
    assert [use.use for use in listing.files if use.file.startswith("global_step3")] == ["tensors"] * 4
    assert any("2 tensor-parallel ranks" in note for note in listing.notes) and listing.step == 3


def test_weights_in_32_bits(tmp_path: Path) -> None:
    """Joined weights are compared with their joined masters, and stored once."""
    masters, _ = saved(tmp_path, torch.float32)
    listing = read(tmp_path)
    assert_same(tmp_path, listing, "model", {**unpadded(masters), "seen": torch.ones(2)})
    assert not [key for key in listing.tensors if key.group == "master"]
    files = DirectoryFiles(tmp_path)
    for key, tensor in listing.tensors.items():
        if key.group == "model" and key.name in ("words", "gated", "second", "rows"):
            other = ForeignTensor(tensor.spec, tensor.copies)
            assert equality.equal(files, tensor._replace(copies=()), other), key


def _without_a_file(top: Path) -> None:
    saved(top)
    (top / "global_step3/mp_rank_01_model_states.pt").unlink()


def _with(**changes: Any) -> Any:
    return lambda top: saved(top, universal_checkpoint_info={**INFO, **changes})


REFUSED: dict[str, tuple[Any, str]] = {
    "no rules": (lambda top: saved(top, universal_checkpoint_info=None), "no 'universal_checkpoint_info'"),
    "sub-parameters": (_with(parameter_with_sub_params=[{"patterns": ["a"]}]), r"parameter_with_sub_params"),
    "geometry": (_with(affine_map={"params": {"a": 1}}), "affine_map"),
    "frozen": (lambda top: saved(top, frozen_param_shapes={"a": torch.Size([1])}), "frozen_param_shapes"),
    "a pattern that takes forever": (_with(vocabulary_parameter_patterns=[r"(a+)+$"]), "a pattern"),
    "many repeats": (_with(vocabulary_parameter_patterns=[r".*.*.*.*x"]), "a pattern"),
    "a wrong pattern": (_with(vocabulary_parameter_patterns=["*"]), "a pattern"),
    "no list": (_with(vocabulary_parameter_patterns="words"), "not a list"),
    "no words": (_with(original_vocab_size=None), "original_vocab_size"),
    "a rank is missing": (_without_a_file, "lacks files of some ranks"),
    "a number of ranks": (lambda top: saved(top, mp_world_size=4), "another number of tensor-parallel ranks"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str) -> None:
    """By file, with the way on."""
    make, said = REFUSED[case]
    make(tmp_path)
    with pytest.raises(StateMismatch, match=said) as refused:
        read(tmp_path)
    assert str(refused.value.members["file"]).startswith("global_step3") and refused.value.hint


def test_parts_that_do_not_fit(tmp_path: Path) -> None:
    """Ranks with different names, and shapes that no rule joins."""
    saved(tmp_path)
    path = tmp_path / "global_step3/mp_rank_01_model_states.pt"
    held = torch.load(path, weights_only=False)
    for change, said in (({"more": torch.ones(2)}, "different tensors"), ({"seen": torch.ones(3)}, "another shape")):
        torch.save({**held, "module": {**held["module"], **change}}, path)
        with pytest.raises(StateMismatch, match=said):
            read(tmp_path)
