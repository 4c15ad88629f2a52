"""The parts of a torchtitan model, without torchtitan: what their modules keep besides tensors is stored with them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import holdfast
from holdfast.integrations.torchtitan_state import ModelParts, explained
from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest, StateMismatch
from tests.client.checkpoint_in_memory import restore, save
from tests.kit.commands import call


class Scaled(nn.Linear):
    """A layer with a value of its own, as Transformer Engine's FP8 scales are one."""

    def __init__(self, value: Any) -> None:
        super().__init__(2, 2)
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


def made(tensor: Any, data: Any, stream: Any, values: Any) -> list[nn.Module]:
    """Two parts of a pipeline, as torchtitan names their layers."""
    first = nn.ModuleDict({"layers": nn.ModuleDict({"0": Scaled(tensor), "1": Scaled(data)})})
    return [first, nn.ModuleDict({"layers": nn.ModuleDict({"2": Scaled(stream), "3": Scaled(values)})})]


def test_extra_state_of_every_kind_is_restored() -> None:
    """A tensor, bytes, a stream and plain values, each by the module's own name, whichever part has it."""
    given = made(torch.tensor([1.5, float("nan")]), b"\x80\x00", io.BytesIO(b"scales"), {"calls": 3})
    checkpoint = save({"model": ModelParts(given).entry()})
    assert "layers.0._extra_state" in checkpoint.stored().values["model"]
    live = made(torch.zeros(2), b"", io.BytesIO(), {"calls": 0})
    restore(checkpoint, {"model": ModelParts(live).entry()})
    found = [layer.value for part in live for layer in part["layers"].values()]
    assert found[0].view(torch.int32).tolist() == given[0]["layers"]["0"].value.view(torch.int32).tolist()
    assert (found[1], found[2].getvalue(), found[3]) == (b"\x80\x00", b"scales", {"calls": 3})
    weights = [[tensor for part in one for tensor in part.parameters()] for one in (given, live)]
    assert all(map(torch.equal, *weights))


def test_two_parts_with_one_name() -> None:
    """One of them would be lost."""
    with pytest.raises(InvalidRequest, match=r"two parts of the model have different tensors named 'weight'"):
        ModelParts([nn.Linear(2, 2), nn.Linear(2, 2)])


def test_a_mapping_stands_for_parts_of_parameters_alone() -> None:
    """A save compares it with the last one; a module with more is walked through again."""
    assert ModelParts([nn.Linear(2, 2)]).entry().keys() == {"weight", "bias"}
    assert isinstance(ModelParts([nn.BatchNorm1d(2)]).entry(), ModelParts)
    assert isinstance(ModelParts([Scaled(1)]).entry(), ModelParts)


class FusedProjection(nn.Module):
    """As torchtitan's `FusedQKVLinear`: for each head of keys its heads of queries, the key and the value."""

    def __init__(self, groups: int, heads_per_kv: int, head_dim: int) -> None:
        super().__init__()
        self.heads_per_kv, self.head_dim = heads_per_kv, head_dim
        self.wqkv = nn.Linear(4, groups * (heads_per_kv + 2) * head_dim, bias=False)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_hint_has_the_program_that_fuses_projections(tmp_path: Path) -> None:
    """An import of torchtitan's own checkpoint with the program of the hint has the rows where the module has them."""
    layers = nn.ModuleDict({str(n): nn.ModuleDict({"qkv_linear": FusedProjection(3, 2, 2)}) for n in range(2)})
    parts = [nn.ModuleDict({"layers": layers})]
    rows = [torch.randn(12, 4), torch.randn(6, 4), torch.randn(6, 4)]
    named = {f"w{part}.weight": tensor for part, tensor in zip("qkv", rows, strict=True)}
    state = {f"layers.{n}.qkv_linear.{name}": tensor for n in range(2) for name, tensor in named.items()}
    dcp.save(state, checkpoint_id=tmp_path / "source", no_dist=True)
    error = StateMismatch("model/layers.0.qkv_linear.wqkv.weight is missing, layers.0.qkv_linear.wq.weight is not live")
    (tmp_path / "fused.toml").write_text(explained(error, parts).hint.partition(":\n")[2])
    words = ("--root", tmp_path / "root", "--program", tmp_path / "fused.toml")
    done = call("import", tmp_path / "source", "run@1", *words)
    assert done.exit_code == 0, done.output
    queries, keys, values = (tensor.view(3, -1, 2, 4) for tensor in rows)
    wanted = torch.cat([queries, keys, values], 1).reshape(24, 4)
    with holdfast.open(tmp_path / "root" / naming.checkpoint_path("run", 1)) as checkpoint:
        assert sorted(checkpoint.tensors["model"]) == [f"layers.{n}.qkv_linear.wqkv.weight" for n in range(2)]
        assert torch.equal(checkpoint.read("layers.1.qkv_linear.wqkv.weight", framework="torch"), wanted)
    assert explained(error, [nn.Linear(2, 2)]) is error
