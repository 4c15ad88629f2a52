"""A torch training goes on from what another program saved: import, then a plain `restore()`, then the same steps."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, get_state_dict

import holdfast
from holdfast import Checkpointer
from holdfast.state.named import Named
from holdfast_formats.errors import StateMismatch
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.control import Control
from holdfast_service.daemon.copying.progress import Quiet
from holdfast_service.storage import PosixTier, stored_in
from holdfast_service.wings.convert.import_jobs import Importer
from tests.daemons import RunningDaemon, running
from tests.databases import sqlite_url
from tests.job_requests import an_import

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning", "ignore:.*TypedStorage:UserWarning")
GOLDEN = Path(__file__).parents[1] / "golden/foreign"
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
Bring = Callable[[Path, str, int], None]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    with running(tmp_path_factory.mktemp("imports") / "root") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def bring(daemon: RunningDaemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bring]:
    """Import a directory as a step of a run of the daemon's root."""
    tier = PosixTier(daemon.root)
    catalog = Catalog.open(sqlite_url(tmp_path_factory.mktemp("catalog") / "catalog.sqlite"))
    control = Control(stored_in(tier), catalog, None)
    importer = Importer(control)
    yield lambda source, run, step: importer.bring(PosixTier(source), an_import(run, step), Quiet())
    control.close()
    catalog.close()


def built(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A module with buffers, and two groups of parameters with hyper-parameters of their own."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    bias = [value for name, value in model.named_parameters() if name.endswith("bias")]
    weights = [value for name, value in model.named_parameters() if name.endswith("weight")]
    return model, torch.optim.AdamW([{"params": weights, "lr": 0.05}, {"params": bias, "weight_decay": 0.0}])


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        rows = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        loss = model(rows).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_equal(one: Any, two: Any) -> None:
    assert one.keys() == two.keys() and all(torch.equal(value, two[name]) for name, value in one.items())


def _dcp(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """What programs save with torch.distributed.checkpoint."""
    weights, state = get_state_dict(model, optimizer)
    flat = get_optimizer_state_dict(model, optimizer, options=FLAT)
    loader = {"dp_rank_0": b"\x80\x04N.", "world_size": 1, "seen": torch.arange(3)}
    titan = {"lr_scheduler": {"last_epoch": 3}, "dataloader": loader, "train_state": {"step": 3}}
    return {
        "plain": {"model": weights, "optim": state, "epoch": 4},
        "flattened": {"app": {"model": weights, "optimizer": flat}},
        "torchtitan": {**model.state_dict(), "optimizer": flat, **titan},
        "lightning": {"state_dict": weights, "optimizer_0": state},
    }


@pytest.mark.parametrize(
    ("kind", "key"), [("plain", "opt"), ("flattened", "optimizer"), ("torchtitan", "opt"), ("lightning", "optim")]
)
def test_dcp(daemon: RunningDaemon, bring: Bring, tmp_path: Path, kind: str, key: str) -> None:
    """The next losses and weights are those of the training that was never interrupted, bit for bit."""
    model, optimizer = built(3)
    trained(model, optimizer, range(3))
    dcp.save(_dcp(model, optimizer)[kind], checkpoint_id=tmp_path, no_dist=True)
    if kind == "lightning":
        torch.save({"epoch": 1, "global_step": 3, "loops": {"fit_loop": {"x": (1, None)}}}, tmp_path / "meta.pt")
    losses = trained(model, optimizer, range(3, 5))

    run = f"dcp-{kind}-{key}"
    bring(tmp_path, run, 3)
    fresh, other = built(8)
    state = {"model": fresh, key: other, **({"epoch": 0} if kind == "plain" else {})}
    with Checkpointer(run, state, at=daemon.socket) as checkpointer:
        assert checkpointer.restore() == 3
        assert trained(fresh, other, range(3, 5)) == losses
        report = checkpointer.last_restore
        if kind == "plain":
            assert state["epoch"] == 4
            checkpointer.save(5, wait="durable")
    assert_equal(model.state_dict(), fresh.state_dict())
    assert report is not None and not report.missing
    assert all(name.startswith("extra/") for name in report.unexpected)
    said = " ".join(report.notes)
    assert all(name in said for name in report.unexpected)
    assert (f"optim/{key} is restored from" in said) is (kind != "flattened")
    if kind == "plain":  # what is saved then is a checkpoint like all others, by this trainer's keys
        again, last = built(9)
        with Checkpointer(run, {"model": again, key: last, "epoch": 0}, at=daemon.socket) as checkpointer:
            assert checkpointer.restore() == 5
        assert_equal(model.state_dict(), again.state_dict())


def test_tied_weights_that_have_two_names(daemon: RunningDaemon, bring: Bring, tmp_path: Path) -> None:
    """Other programs keep optimizer state under each name of tied weights, or an import lists it so; torch has one."""
    state = {name: {kind: torch.rand(5, 4) for kind in ("exp_avg", "exp_avg_sq")} for name in ("0.weight", "1.weight")}
    for held in state.values():
        held["step"] = torch.tensor(3.0)
    weight = torch.rand(5, 4)
    groups = [{"params": list(state), "lr": 0.5}]
    saved = {"model": {"0.weight": weight, "1.weight": weight}, "optim": {"state": state, "param_groups": groups}}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    bring(tmp_path, "tied", 3)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer("tied", {"model": model, "optim": optimizer}, at=daemon.socket) as checkpointer:
        assert checkpointer.restore() == 3
        report = checkpointer.last_restore
    assert torch.equal(model[0].weight, weight)
    for kind, value in state["0.weight"].items():
        assert torch.equal(optimizer.state[model[0].weight][kind], value)
    surplus = {f"optim/1.weight/{kind}" for kind in state["1.weight"]}
    assert report is not None and set(report.unexpected) == surplus
    assert all(any(name in note for note in report.notes) for name in surplus)
    untied = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    other = torch.optim.AdamW(untied[:1].parameters())
    state = {"model": untied, "optim": other}
    with (
        Checkpointer("tied", state, at=daemon.socket) as checkpointer,
        pytest.raises(StateMismatch, match=r"optim/1.weight/exp_avg"),
    ):
        checkpointer.restore()


class Tiny(nn.Module):
    """The module of `tests/golden/make_deepspeed.py`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.mix = nn.Linear(5, 7)
        self.out = nn.Linear(7, 5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("seen", torch.zeros(2))


@pytest.fixture(scope="module")
def zero(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What DeepSpeed saved, as a user has it, and beside it the values that its own functions give."""
    target = tmp_path_factory.mktemp("deepspeed")
    with tarfile.open(GOLDEN / "deepspeed.tar.xz") as archive:
        archive.extractall(target, filter="data")
    for path in target.glob("*/expected.safetensors"):
        path.rename(target / f"{path.parent.name}.safetensors")
    return target


@pytest.mark.parametrize("name", ["zero1_fp32", "zero2_fp16", "zero3_bf16", "zero3_fp32"])
def test_deepspeed(daemon: RunningDaemon, bring: Bring, zero: Path, name: str) -> None:
    """Weights, FP32 masters and moments are DeepSpeed's, exactly, in a module and an AdamW over FP32 parameters."""
    wanted = load_file(zero / f"{name}.safetensors")
    bring(zero / name, name, 3)
    model = Tiny().to({"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[name.split("_")[1]])
    model.seen = model.seen.to(wanted["seen"].dtype)
    trained_ones = {name: value for name, value in model.named_parameters() if value.requires_grad}
    masters = trained_ones
    if not name.endswith("fp32"):
        masters = {name: value.detach().float().requires_grad_() for name, value in trained_ones.items()}
    decayed = [value for name, value in masters.items() if value.ndim > 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": [v for v in masters.values() if v.ndim < 2]}])
    state = {"model": model, "optimizer": optimizer, **({} if masters is trained_ones else {"master": masters})}
    with Checkpointer(name, state, at=daemon.socket) as checkpointer:
        assert checkpointer.restore() == 3
        assert checkpointer.last_restore is not None and not checkpointer.last_restore.missing
    for key, value in model.state_dict().items():
        assert torch.equal(value, wanted["embed.weight" if key == "head.weight" else key]), key
    for key, master in masters.items():
        assert torch.equal(master, wanted.get(f"{key}/master", wanted[key]))
        held = optimizer.state[master]
        assert torch.equal(held["exp_avg"], wanted[f"{key}/exp_avg"])
        assert torch.equal(held["exp_avg_sq"], wanted[f"{key}/exp_avg_sq"])
        assert held["step"].shape == () and 1 <= held["step"].item() <= 3
        master.grad = torch.ones_like(master)
    optimizer.step()
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_only_the_masters(daemon: RunningDaemon, bring: Bring, zero: Path) -> None:
    """A module in FP32 goes on from the masters of a training in FP16: its parameters stand as masters in the state."""
    wanted = load_file(zero / "zero2_fp16.safetensors")
    bring(zero / "zero2_fp16", "masters", 3)
    model = Tiny()
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    optimizer = torch.optim.AdamW(parameters.values())
    with Checkpointer("masters", {"master": parameters, "optim": optimizer}, at=daemon.socket) as checkpointer:
        assert checkpointer.restore(keep=("optim/weight_decay",)) == 3
    for key, value in parameters.items():
        assert torch.equal(value, wanted[f"{key}/master"])
        assert torch.equal(optimizer.state[value]["exp_avg"], wanted[f"{key}/exp_avg"])


def test_a_torch_file(daemon: RunningDaemon, bring: Bring, tmp_path: Path) -> None:
    """The file of many a loop: the optimizer goes by the names that it was given."""
    model, _ = built(3)
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW([{"params": named[::2], "lr": 0.05}, {"params": named[1::2], "weight_decay": 0.0}])
    trained(model, optimizer, range(3))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, tmp_path / "last.pt")
    losses = trained(model, optimizer, range(3, 5))
    bring(tmp_path, "file", 3)
    fresh, other = built(8)  # whose groups have other parameters
    others = list(fresh.parameters())
    other = torch.optim.AdamW([{"params": others[::2]}, {"params": others[1::2]}])
    with Checkpointer("file", {"model": fresh, "opt": other}, at=daemon.socket) as checkpointer:
        assert checkpointer.restore() == 3
        assert trained(fresh, other, range(3, 5)) == losses
    assert_equal(model.state_dict(), fresh.state_dict())


class Adapted(nn.Module):
    """A frozen layer and its adapter, as PEFT builds them."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 6)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 6, bias=False)})


def test_an_adapter(daemon: RunningDaemon, bring: Bring, tmp_path: Path) -> None:
    """A trainer fills the adapter in place, as `integrations.peft.adapter` names it; a reader reads it."""
    saved = {"base_model.lora_A.weight": torch.randn(2, 4), "base_model.lora_B.weight": torch.randn(6, 2)}
    save_file(saved, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    bring(tmp_path, "adapter", 7)
    model = Adapted()
    renamed = {f"lora_{part}.default.weight": f"base_model.lora_{part}.weight" for part in "AB"}
    base = model.base_layer.weight.detach().clone()
    entry = Named(model, rename=renamed, only=renamed.__contains__)
    with Checkpointer("adapter", {"adapter": entry}, at=daemon.socket) as checkpointer:
        assert checkpointer.restore() == 7
    for own, name in renamed.items():
        assert torch.equal(model.state_dict()[own], saved[name])
    assert torch.equal(model.base_layer.weight, base)
    with holdfast.open("adapter@7", root=daemon.root) as checkpoint:
        for name, value in saved.items():
            assert torch.equal(checkpoint.read(name, group="adapter", framework="torch"), value)


def test_what_a_trainer_still_needs(daemon: RunningDaemon, bring: Bring, tmp_path: Path) -> None:
    """Weights fill the group model; a trainer with an optimizer, or with more of its own than was saved, is refused."""
    model, optimizer = built(3)
    trained(model, optimizer, range(1))
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "weights", no_dist=True)
    bring(tmp_path / "weights", "weights", 1)
    fresh, other = built(8)
    with Checkpointer("weights", {"model": fresh, "optim": other}, at=daemon.socket) as checkpointer:
        assert checkpointer.restore(groups=("model",)) == 1
        assert_equal(model.state_dict(), fresh.state_dict())
        with pytest.raises(StateMismatch, match="optim"):
            checkpointer.restore()
        assert not other.state

    dcp.save({**_dcp(model, optimizer)["plain"], "loader": {"at": 5}}, checkpoint_id=tmp_path / "all", no_dist=True)
    bring(tmp_path / "all", "all", 1)
    with Checkpointer("all", {"model": fresh, "optim": other, "data": {"at": 0}}, at=daemon.socket) as checkpointer:
        with pytest.raises(StateMismatch, match="extra/data"):
            checkpointer.restore()
        assert not other.state
