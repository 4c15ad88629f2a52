"""Megatron's files by rank become one model, each element in its place; what no rule joins is refused or compared."""

from __future__ import annotations

import argparse
import enum
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast_formats.errors import CheckpointError, CorruptExtent, StateMismatch
from holdfast_formats.mapping import equality
from holdfast_formats.mapping.listing import ForeignListing, ForeignTensor
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.wings.convert.foreign import megatron_ranks
from holdfast_service.wings.convert.foreign.kinds import choose
from holdfast_service.wings.convert.foreign.known_kinds import KINDS
from tests.wings.convert.foreign.dcp.directories import DirectoryFiles, assert_same

WIDTH, INNER, WORDS, LAYERS = 8, 12, 16, 4
Tensors = dict[str, torch.Tensor]
ROWS = ("word_embeddings.weight", "linear_qkv.weight", "linear_qkv.bias", "output_layer.weight")
COLUMNS = ("linear_proj.weight", "linear_fc2.weight")


class Backend(enum.Enum):
    """As Megatron's arguments contain."""

    LOCAL = 1


def model(gated: bool) -> Tensors:
    """A GPT of Megatron-core under its names."""
    torch.manual_seed(0)
    made = {"embedding.word_embeddings.weight": torch.randn(WORDS, WIDTH)}
    for layer in range(LAYERS):
        at = f"decoder.layers.{layer}."
        made |= {
            f"{at}self_attention.linear_qkv.layer_norm_weight": torch.randn(WIDTH),
            f"{at}self_attention.linear_qkv.weight": torch.randn(3 * WIDTH, WIDTH),
            f"{at}self_attention.linear_qkv.bias": torch.randn(3 * WIDTH),
            f"{at}self_attention.linear_proj.weight": torch.randn(WIDTH, WIDTH).bfloat16(),
            f"{at}mlp.linear_fc1.weight": torch.randn((1 + gated) * INNER, WIDTH),
            f"{at}mlp.linear_fc1.bias": torch.randn((1 + gated) * INNER),
            f"{at}mlp.linear_fc2.weight": torch.randn(WIDTH, INNER),
        }
    return {**made, "decoder.final_layernorm.weight": torch.randn(WIDTH), "output_layer.weight": torch.randn(WORDS, WIDTH)}


def part(name: str, tensor: torch.Tensor, rank: int, ranks: int, gated: bool) -> torch.Tensor:
    """What Megatron's column- and row-parallel layers hold on a rank."""
    if "linear_fc1" in name:
        both = tensor.chunk(2) if gated else (tensor,)
        return torch.cat([one.chunk(ranks)[rank] for one in both])
    if name.endswith(ROWS):
        return tensor.chunk(ranks)[rank].clone()
    return tensor.chunk(ranks, 1)[rank].clone() if name.endswith(COLUMNS) else tensor


def nested(tensors: Tensors) -> dict[str, Any]:
    """As modules outside of Megatron-core save themselves: the language model in a dict of its own."""
    made: dict[str, Any] = {}
    for name, tensor in tensors.items():
        outer, _, inner = name.partition(".")
        made.setdefault(outer, {})[inner] = tensor
    return made


def saved(
    top: Path, ranks: int, stages: int, gated: bool = True, chunks: int = 1, deep: bool = False, **more: Any
) -> Tensors:
    """Write a checkpoint in this many parts; the whole model."""
    whole, each = model(gated), LAYERS // stages // chunks
    top.mkdir(parents=True, exist_ok=True)
    (top / "latest_checkpointed_iteration.txt").write_text("20")
    for stage in range(stages):
        for rank in range(ranks):
            sizes = {"tensor_model_parallel_size": ranks, "pipeline_model_parallel_size": stages}
            arguments = argparse.Namespace(swiglu=gated, kind=Backend.LOCAL, **sizes)
            value: dict[str, Any] = {"args": arguments, "checkpoint_version": 3.0, "iteration": 20}
            for chunk in range(chunks):
                first = (chunk * stages + stage) * each
                own: Tensors = {}
                for name, tensor in whole.items():
                    layer = int(name.split(".")[2]) if "layers" in name else None
                    begins, ends = stage == chunk == 0, stage == stages - 1 and chunk == chunks - 1
                    if layer is None and not (begins if "embedding" in name else ends):
                        continue
                    if layer is not None and not first <= layer < first + each:
                        continue
                    local = name if layer is None else name.replace(f"layers.{layer}.", f"layers.{layer - first}.")
                    own[local] = part(name, tensor, rank, ranks, gated)
                extra = {"decoder._extra_state": None, "decoder.layers.0._extra_state": io.BytesIO(b"scales")}
                value["model" if chunks == 1 else f"model{chunk}"] = nested(own) if deep else {**own, **extra}
            value |= {"opt_param_scheduler": {"max_lr": 0.5}, **more}
            place = top / "iter_0000020" / (f"mp_rank_{rank:02}" if stages == 1 else f"mp_rank_{rank:02}_{stage:03}")
            place.mkdir(parents=True)
            torch.save(value, place / "model_optim_rng.pt")
    return whole


def read(top: Path, **options: Any) -> ForeignListing:
    files = DirectoryFiles(top)
    assert choose(files, None, KINDS) is megatron_ranks.KIND
    return megatron_ranks.KIND.read(files, ReadOptions(**options))


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


def test_twelve_interleaved_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of their numbers: 10 is not before 2."""
    monkeypatch.setitem(globals(), "LAYERS", 24)
    whole = saved(tmp_path, 1, 2, chunks=12)
    assert_same(tmp_path, read(tmp_path), "model", whole)


def test_layers_of_several_modules(tmp_path: Path) -> None:
    """Each module's layers are numbered through: those of another module do not count."""
    whole = saved(tmp_path, 1, 2)
    first, last = ("vision_model.decoder.layers.0.norm.weight", "mtp.layers.0.transformer_layer.layers.1.weight")
    more = {first.replace("0", str(n)): torch.randn(WIDTH) for n in range(3)}
    _change(tmp_path, "mp_rank_00_000", lambda value: value["model"].update(more))
    _change(tmp_path, "mp_rank_00_001", lambda value: value["model"].update({last: torch.ones(WIDTH)}))
    assert_same(tmp_path, read(tmp_path), "model", {**whole, **more, last: torch.ones(WIDTH)})


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


def test_what_all_ranks_have_is_compared(tmp_path: Path) -> None:
    saved(tmp_path, 2, 1)
    name = "decoder.final_layernorm.weight"
    (copied,) = [one for key, one in read(tmp_path).tensors.items() if key.name == name]
    assert [piece.file for piece in copied.copies] == ["iter_0000020/mp_rank_01/model_optim_rng.pt"]


def test_norms_of_their_own(tmp_path: Path) -> None:
    """Before a fused matrix they get the names of `torch_dist`, unless all is to stay as it is."""
    whole = saved(tmp_path, 1, 1)
    norms = {f"decoder.layers.0.{name}.weight": torch.randn(WIDTH) for name in ("input_layernorm", "pre_mlp_layernorm")}
    fused = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
    dropped = f"decoder.layers.0.{fused[0]}"
    del whole[dropped]
    _change(tmp_path, "mp_rank_00", lambda value: (value["model"].update(norms), value["model"].pop(dropped)))
    named = {f"decoder.layers.0.{name}": one for name, one in zip(fused, norms.values(), strict=True)}
    assert_same(tmp_path, read(tmp_path), "model", {**whole, **named})
    assert_same(tmp_path, read(tmp_path, as_is=True), "model", {**whole, **norms})


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


def _change(top: Path, rank: str, change: Callable[[dict[str, Any]], object]) -> None:
    path = top / "iter_0000020" / rank / "model_optim_rng.pt"
    value = torch.load(path, weights_only=False)
    change(value)
    torch.save(value, path)


def _replace(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    return lambda top: _change(top, "mp_rank_01", lambda value: value["model"].update({name: tensor}))


def _no_rank(top: Path) -> None:
    (top / "iter_0000020" / "mp_rank_00").rename(top / "iter_0000020" / "mp_rank_02")


def _experts(top: Path) -> None:
    (top / "iter_0000020" / "mp_rank_00_000_001").mkdir()


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a rank is missing": (_no_rank, "not those of 3"),
    "expert parallelism": (_experts, "expert parallelism"),
    "another step": (lambda top: _change(top, "mp_rank_01", lambda value: value.update(iteration=21)), "step 21"),
    "an old version": (
        lambda top: _change(top, "mp_rank_00", lambda one: one.update(checkpoint_version=1.0)),
        "version",
    ),
    "another tensor": (_replace("more.weight", torch.ones(2)), "different tensors"),
    "a width": (_replace("output_layer.weight", torch.ones(8, 7)), "do not fit"),
    "a shape": (_replace("decoder.final_layernorm.weight", torch.ones(7)), "no rule"),
    "rows of an MLP": (_replace("decoder.layers.0.mlp.linear_fc1.weight", torch.ones(5, WIDTH)), "do not belong"),
    "no tensor": (lambda top: _change(top, "mp_rank_00", lambda value: value["model"].update(x=3)), "no state dict"),
    "no model": (lambda top: _change(top, "mp_rank_00", lambda value: value.pop("model")), "content that Megatron writes"),
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
