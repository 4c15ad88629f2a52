"""What is exported for DCP is loaded by torch, bit for bit, in each layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.mapping import optimizer_state
from holdfast_formats.mapping.box_moves import MappedTensor
from holdfast_formats.mapping.listing import TensorKey
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.foreign.dcp import export, export_names
from holdfast_service.wings.convert.foreign.dcp.export import DcpExport
from holdfast_service.wings.convert.foreign.pickled.dtypes import TORCH
from tests.wings.convert.foreign.dcp.directories import Held, bytes_of, write

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning", "ignore:.*TypedStorage:UserWarning")


def _random(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Any bits, NaNs included."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    data = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
    return (data % 2).view(dtype).reshape(shape) if dtype == torch.bool else data.view(dtype).reshape(shape)


def _exported(root: Path, values: dict[TensorKey, torch.Tensor], layout: str, **more: Any) -> DcpExport:
    source = Held(values)
    made = export.target_files(source.mapped, more.pop("documents", {}), layout, **more)
    write(root, made.files, source, source.tensors)
    return made


def _model(values: dict[str, torch.Tensor]) -> dict[TensorKey, torch.Tensor]:
    return {TensorKey("model", name): value for name, value in values.items()}


def test_every_dtype_and_shape(tmp_path: Path) -> None:
    """Whatever the bits are, over several files; torch's own converter finds names and nesting."""
    values = {f"layers.0.{name}": _random((3, 5), getattr(torch, name.removeprefix("torch."))) for name in TORCH}
    values |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(4, 0, 2), "long": _random((3000,))}
    made = _exported(tmp_path, _model(values), "plain", file_bytes_max=4000)
    assert made.left_out == ()
    assert [file.name for file in made.files][:2] == ["__0_0.distcp", "__0_1.distcp"]
    assert made.files[-1].name == ".metadata"
    into = {name: torch.zeros_like(value) for name, value in values.items()}
    dcp.load(into, checkpoint_id=tmp_path)
    assert {name: bytes_of(value) for name, value in into.items()} == {n: bytes_of(v) for n, v in values.items()}


def test_a_training_resumes(tmp_path: Path) -> None:
    """Model, optimizer and values in the form of `get_state_dict`, by torch's loader and its converter."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    values = _model({name: value.clone() for name, value in model.state_dict().items()})
    for name, parameter in model.named_parameters():
        values |= {TensorKey("optim", f"{name}/{kind}"): v for kind, v in optimizer.state[parameter].items()}
    hyper = {key: list(v) if isinstance(v, tuple) else v for key, v in optimizer.param_groups[0].items() if key != "params"}
    hyper["betas"] = {"$tuple": [0.9, 0.999]}
    for key in ("foreach", "fused", "capturable", "differentiable"):
        del hyper[key]
    documents = {
        "optim": {"optimizer": optimizer_state.document([(names, hyper)])},
        "extra": {"scheduler": {"last_epoch": 7, "base": [1, 2.5]}, "rng": {}, "odd": {"$set": [1]}},
    }
    _exported(tmp_path, values, "fsdp", documents=documents)
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    fresh = torch.optim.AdamW(other.parameters(), lr=1.0)
    weights, state = get_state_dict(other, fresh)
    into: dict[str, Any] = {"model": weights, "optimizer": state, "scheduler": {"last_epoch": 0, "base": []}, "odd": set()}
    dcp.load(into, checkpoint_id=tmp_path)
    set_state_dict(other, fresh, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
    assert into["scheduler"] == {"last_epoch": 7, "base": [1, 2.5]}
    assert into["odd"] == {1}
    for module in (model, other):
        module.zero_grad()
        module(torch.ones(3)).sum().backward()
    optimizer.step()
    fresh.step()
    assert fresh.param_groups[0]["betas"] == (0.9, 0.999)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    dcp_to_torch_save(tmp_path, tmp_path / "whole.pt")
    nested = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert nested["optimizer"]["param_groups"][0]["params"] == names
    assert torch.equal(nested["model"]["0.weight"], values[TensorKey("model", "0.weight")])


def test_torchtitans_names(tmp_path: Path) -> None:
    """Weights have no prefix, and names and keys of the optimizer are joined."""
    values = _model({"layers.0.wq.weight": _random((2, 2))})
    values[TensorKey("optim", "layers.0.wq.weight/exp_avg")] = _random((2, 2))
    values[TensorKey("optim", "layers.0.wq.weight/step")] = torch.tensor(3.0)
    values[TensorKey("master", "layers.0.wq.weight")] = _random((2, 2))
    values[TensorKey("ema", "layers.0.wq.weight")] = _random((2, 2))
    values[TensorKey("extra", "train_state/step")] = torch.tensor(9)
    values[TensorKey("extra", "lr/nested")] = torch.tensor(4)
    values[TensorKey("extra", "ranks/0/rng/torch")] = torch.zeros(3)
    document = optimizer_state.document([(["layers.0.wq.weight"], {"lr": 0.5})])
    document["masters"] = {"master_param": ["layers.0.wq.weight"]}
    documents = {"optim": {"optim": document}, "extra": {"lr": {"a": [{"$tensor": "lr/nested"}, 5]}}}
    made = _exported(tmp_path, values, "torchtitan", documents=documents)
    found = dcp.FileSystemReader(tmp_path).read_metadata()
    name = "optimizer.param_groups.layers.0.wq.weight"
    wanted = {f"{name}.{key}" for key in ("lr", "foreach", "fused", "capturable", "differentiable")}
    name = "optimizer.state.layers.0.wq.weight"
    wanted |= {f"{name}.exp_avg", f"{name}.step", f"{name}.master_param", "layers.0.wq.weight"}
    assert set(found.state_dict_metadata) == wanted | {"train_state.step", "lr.a.0", "lr.a.1"}
    assert found.planner_data[f"{name}.exp_avg"] == ("optimizer", "state.layers.0.wq.weight.exp_avg")
    assert dict(made.left_out) == {
        "ema/layers.0.wq.weight": "layout torchtitan cannot hold group ema: "
        "--weights ema exports it in place of the model's weights",
        "extra/ranks/0/rng/torch": "it belongs to one rank",
    }
    into = {"lr": {"a": [torch.tensor(0), 0]}, "train_state": {"step": torch.tensor(0)}}
    dcp.load(into, checkpoint_id=tmp_path)
    assert into["lr"]["a"] == [torch.tensor(4), 5]
    assert into["train_state"]["step"] == 9


def test_what_has_no_place_is_named() -> None:
    """A layout for the model alone, dtypes that torch lacks, values that are not plain, and unknown layouts."""
    values = _model({"x": torch.zeros(2)})
    values[TensorKey("optim", "x/exp_avg")] = torch.zeros(2)
    source = Held(values)
    documents = {"extra": {"loader": {"$device": "cpu"}, "ok": 1}}
    six = MappedTensor(TensorSpec("model", "six", "F6_E2M3", (4,)), (), padded=True)
    made = export.target_files([*source.mapped, six], documents, "fsdp")
    assert dict(made.left_out) == {
        "model/six": "torch has no dtype for F6_E2M3",
        "extra/loader": "the tag $device is unknown",
        "optim (hyper-parameters)": "the checkpoint has none",
    }
    made = export.target_files(source.mapped, documents, "plain")
    assert {key for key, _ in made.left_out} == {"extra/loader", "extra/ok", "optim/x/exp_avg"}
    assert "megatron" not in export_names.LAYOUTS
    with pytest.raises(InvalidRequest, match="there is no layout 'megatron'"):
        export.target_files(source.mapped, documents, "megatron")


def test_an_optimizer_with_numbers_is_left_out(tmp_path: Path) -> None:
    """torch finds the state of an optimizer in a directory by the names of its parameters."""
    document = {**optimizer_state.document([(["0"], {"lr": 0.5})]), optimizer_state.NUMBERED: True}
    values = _model({"w": torch.ones(2)}) | {TensorKey("optim", "0/exp_avg"): torch.ones(2)}
    made = _exported(tmp_path, values, "fsdp", documents={"optim": {"optim": document}})
    reasons = dict(made.left_out)
    assert "numbers" in reasons["optim/optim"] and "optim/0/exp_avg" in reasons
