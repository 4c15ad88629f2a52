"""Parts of ranks become whole tensors: layers of stages are numbered through, and what no rule cuts is compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.wings.convert.foreign.dcp.directories import assert_same
from tests.wings.convert.foreign.megatron_ranks import ranks as made
from tests.wings.convert.foreign.megatron_ranks.ranks import WIDTH, change, read, saved


def test_twelve_interleaved_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of their numbers: 10 is not before 2."""
    monkeypatch.setattr(made, "LAYERS", 24)
    whole = saved(tmp_path, 1, 2, chunks=12)
    assert_same(tmp_path, read(tmp_path), "model", whole)


def test_layers_of_several_modules(tmp_path: Path) -> None:
    """Each module's layers are numbered through: those of another module do not count."""
    whole = saved(tmp_path, 1, 2)
    first, last = ("vision_model.decoder.layers.0.norm.weight", "mtp.layers.0.transformer_layer.layers.1.weight")
    more = {first.replace("0", str(n)): torch.randn(WIDTH) for n in range(3)}
    change(tmp_path, "mp_rank_00_000", lambda value: value["model"].update(more))
    change(tmp_path, "mp_rank_00_001", lambda value: value["model"].update({last: torch.ones(WIDTH)}))
    assert_same(tmp_path, read(tmp_path), "model", {**whole, **more, last: torch.ones(WIDTH)})


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
    change(tmp_path, "mp_rank_00", lambda value: (value["model"].update(norms), value["model"].pop(dropped)))
    named = {f"decoder.layers.0.{name}": one for name, one in zip(fused, norms.values(), strict=True)}
    assert_same(tmp_path, read(tmp_path), "model", {**whole, **named})
    assert_same(tmp_path, read(tmp_path, as_is=True), "model", {**whole, **norms})
