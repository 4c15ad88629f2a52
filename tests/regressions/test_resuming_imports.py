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
from holdfast_formats.errors import StateMismatch
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.decisions import Decisions
from holdfast_service.daemon.copying.importing import ImportOptions
from holdfast_service.storage import PosixTier
from holdfast_service.wiring.imports import Importer, WantedImport
from holdfast_service.wiring.progress import Quiet
from tests.daemons import RunningDaemon, running
from tests.databases import sqlite_url

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
    decisions = Decisions(tier, catalog, None)
    importer = Importer(tier, decisions)
    yield lambda source, run, step: importer.bring(PosixTier(source), WantedImport(run, step, ImportOptions()), Quiet())
    decisions.close()
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
    assert (f"optim/{key} is what the checkpoint" in said) is (kind != "flattened")
    if kind == "plain":  # what is saved then is a checkpoint like all others, by this trainer's keys
        again, last = built(9)
        with Checkpointer(run, {"model": again, key: last, "epoch": 0}, at=daemon.socket) as checkpointer:
            assert checkpointer.restore() == 5
        assert_equal(model.state_dict(), again.state_dict())
