"""Checkpoints of Megatron-core: layers and experts that are stacked, optimizer state by weight, common state.

The structures and names are those of megatron-core 0.12 to 0.16; torch's own writer makes the files. What
megatron-core 0.16.1 itself writes is read in `tests/integrations/megatron`.
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.planner_helpers import _create_write_items

from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping.listing import ForeignListing
from holdfast_formats.region import Box
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.wings.convert.foreign.dcp import kinds
from tests.wings.convert.foreign.dcp.directories import DirectoryFiles, assert_same, read
from tests.wings.convert.foreign.dcp.saving import Sharded, ShardPlanner, save_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*TypedStorage:UserWarning")


class MegatronPlanner(ShardPlanner):
    """Plans as Megatron-core's planner does: nothing is flattened, and objects come as streams, on every rank."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def create_local_plan(self) -> SavePlan:
        items: list[WriteItem] = []
        for fqn, value in self.state_dict.items():
            items += _create_write_items(fqn, value)
        self.plan = SavePlan(items)
        return self.plan

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return object

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found if isinstance(found, io.BytesIO) else super().lookup_object(index)


def _object(value: Any) -> io.BytesIO:
    made = io.BytesIO()
    torch.save([value], made)
    return made


def _save(path: Path, states: list[dict[str, Any]], common: dict[str, Any] | None = None) -> None:
    path.mkdir(parents=True, exist_ok=True)
    save_ranks(path, states, planners=[MegatronPlanner() for _ in states])
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    if common is not None:
        torch.save(common, path / "common.pt")


def _listing(path: Path, **options: bool) -> ForeignListing:
    return kinds.read_megatron(DirectoryFiles(path), ReadOptions(**options))


def _common(step: float = 7.0, **more: Any) -> dict[str, Any]:
    groups = [{"lr": 0.5, "wd_mult": mult, "step": step} for mult in (1.0, 0.0)]
    return {"iteration": 7, "optimizer": {"optimizer": {"param_groups": groups}}, **more}


NAMES = ("decoder.layers.{}self_attention.linear_qkv.weight", "decoder.layers.{}mlp.experts.{}experts.linear_fc1.weight")


def test_layers_and_experts_are_told_apart(tmp_path: Path) -> None:
    """Layers on two ranks of a pipeline, experts in each, moments and masters of the same form."""
    qkv, experts = torch.arange(4 * 6.0).reshape(4, 3, 2), torch.arange(4 * 8.0).reshape(4, 2, 2, 2) + 100
    states: list[dict[str, Any]] = []
    for rank in range(2):
        layers = range(2 * rank, 2 * rank + 2)
        state: dict[str, Any] = {}
        for prefix, add in (("", 0), ("optimizer.state.exp_avg.", 1), ("optimizer.state.fp32_param.", 2)):
            boxes = [Box((layer, 0, 0), (1, 3, 2)) for layer in layers]
            state[prefix + NAMES[0].format("")] = Sharded(qkv + add, boxes)
            boxes = [Box((layer, e, 0, 0), (1, 1, 2, 2)) for layer in layers for e in range(2)]
            state[prefix + NAMES[1].format("", "")] = Sharded(experts + add, boxes)
        states.append(state)
    states[0]["decoder.final_layernorm.weight"] = torch.ones(2)
    states[0]["decoder.layers.self_attention._extra_state/shard_0_4"] = _object(None)
    states[1]["decoder.layers.self_attention._extra_state/shard_2_4"] = _object(io.BytesIO(b""))
    states[1]["decoder.layers.self_attention._extra_state/shard_3_4"] = _object(io.BytesIO(b"fp8"))
    states[0]["rng_state/shard_0.0_2.1"] = _object([{"torch_rng_state": torch.arange(3), "random": (3, (1, 2), None)}])
    _save(tmp_path, states, _common(args=argparse.Namespace(tp=1, dtype=torch.bfloat16, place=Path("/x"))))
    listing = _listing(tmp_path)
    wanted = {NAMES[0].format(f"{i}."): qkv[i] for i in range(4)}
    wanted |= {NAMES[1].format(f"{i}.", f"{e}."): experts[i, e] for i in range(4) for e in range(2)}
    model = {**wanted, "decoder.final_layernorm.weight": torch.ones(2)}
    assert_same(tmp_path, listing, "model", model)
    assert_same(tmp_path, listing, "master", {name: value + 2 for name, value in wanted.items()})
    moments = {f"{name}/exp_avg": value + 1 for name, value in wanted.items()}
    assert_same(tmp_path, listing, "optim", moments | {f"{name}/step": torch.tensor(7.0) for name in wanted})
    document = listing.documents["optim"]["optimizer"]
    assert set(document["masters"]["master_param"]) == set(wanted)
    assert set(next(iter(document["groups"].values()))["params"]) == set(wanted)
    extra = listing.documents["extra"]
    assert set(extra) == {"common", "rng_state", "decoder.layers.self_attention._extra_state"}
    assert extra["decoder.layers.self_attention._extra_state"] == {"3_4": [{"$bytes": "ZnA4"}]}
    assert read(tmp_path, listing, "extra", "rng_state/0.0_2.1/0/0/torch_rng_state").tolist() == [0, 1, 2]
    assert {k: v for k, v in extra["common"]["args"].items() if k != "$keys"} == {
        "tp": 1,
        "dtype": {"$dtype": "bfloat16"},
        "place": "/x",
    }
    assert listing.step == 7
    assert "2 empty extra states were skipped" in listing.notes
    assert {use.file: use.use for use in listing.files} == {
        ".metadata": "state", "__0_0.distcp": "tensors", "__1_0.distcp": "tensors", "common.pt": "state",
        "metadata.json": "state",
    }  # fmt: skip


def test_the_newest_form(tmp_path: Path) -> None:
    """Layers by number, the common state among the objects, and experts' optimizers in a chain."""
    state = {
        "decoder.layers.0.mlp.linear_fc1.weight": torch.ones(2, 2),
        "optimizer.state.param.decoder.layers.0.mlp.linear_fc1.weight": torch.zeros(2, 2),
        "chained_1.optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc1.weight": torch.ones(2, 2) * 3,
        "common_state/shard_0_1": _object(_common(3.0)),
    }
    _save(tmp_path, [state])
    listing = _listing(tmp_path)
    assert {key.group: key.name for key in listing.tensors if key.group != "optim"} == {
        "model": "decoder.layers.0.mlp.linear_fc1.weight",
        "master": "decoder.layers.0.mlp.linear_fc1.weight",
    }
    assert read(tmp_path, listing, "optim", "decoder.layers.0.mlp.linear_fc1.weight/step") == 3
    assert listing.documents["extra"]["common"]["iteration"] == 7
    as_is = _listing(tmp_path, as_is=True)
    assert {key.name for key in as_is.tensors} == set(state) - {"common_state/shard_0_1"}
    assert {key.group for key in as_is.tensors} == {"model"}


def test_what_cannot_be_named_is_kept_and_said(tmp_path: Path) -> None:
    """Flat buffers of the distributed optimizer, a common state that needs code, and steps that differ."""
    buffers = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_bf16.bucket_idx_0.exp_avg"
    state = {"x": torch.ones(2), buffers: torch.zeros(5)}
    _save(tmp_path / "a", [state], {"code": print})
    listing = _listing(tmp_path / "a")
    assert_same(tmp_path / "a", listing, "extra", {buffers: torch.zeros(5)})
    assert any("do not name their weights" in note for note in listing.notes)
    assert any("the common state was left out" in note and "print" in note for note in listing.notes)
    [use] = [use for use in listing.files if use.file == "common.pt"]
    assert use.use == "unused"
    assert listing.documents == {}
    common = _common()
    common["optimizer"]["optimizer"]["param_groups"][1]["step"] = 8.0
    _save(tmp_path / "b", [{"x": torch.ones(2), "optimizer.state.exp_avg.x": torch.ones(2)}], common)
    listing = _listing(tmp_path / "b")
    assert {key.name for key in listing.tensors} == {"x", "x/exp_avg"}
    assert "no optimizer step is stored: the common state has several or none: 7, 8" in listing.notes


def test_refused(tmp_path: Path) -> None:
    """Two numbers of layers, and no weights at all."""
    _save(tmp_path / "a", [{"decoder.layers.a.weight": torch.ones(2, 1), "decoder.layers.b.weight": torch.ones(3, 1)}])
    with pytest.raises(StateMismatch, match=r"has 3 layers, but other tensors below 'decoder\.layers' have 2"):
        _listing(tmp_path / "a")
    _save(tmp_path / "b", [{"optimizer.state.exp_avg.x": torch.ones(2)}])
    with pytest.raises(StateMismatch, match="it has no weights"):
        _listing(tmp_path / "b")
