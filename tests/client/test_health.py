"""Health end to end: real training saves through a real daemon, a NaN is planted, found at the next commit and named."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast import Checkpointer
from holdfast.read.reader import CheckpointReader
from holdfast.read.sources import DirectorySource
from holdfast.rest.api import Api
from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest, NoSuchCheckpoint
from tests.daemons import RunningDaemon, wait_until
from tests.kit.commands import call
from tests.kit.daemons import own_daemon

RUN = "health"


daemon = own_daemon()


@pytest.fixture(scope="module")
def api(daemon: RunningDaemon) -> Iterator[Api]:
    with Api(daemon.url) as api:
        yield api


def state(seed: int) -> dict:
    """A model with a mask and half-precision weights, and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    model.register_buffer("mask", torch.triu(torch.full((5, 5), float("-inf")), 1))
    return {
        "model": model,
        "optim": torch.optim.AdamW(model.parameters(), lr=0.01),
        "half": torch.ones(9, dtype=torch.bfloat16),
    }


def train(live: dict) -> None:
    live["optim"].zero_grad()
    live["model"](torch.randn(16, 8)).square().mean().backward()
    live["optim"].step()


@pytest.fixture(scope="module")
def trained(daemon: RunningDaemon, api: Api) -> dict:
    """Four steps; at the third a weight breaks, at the fourth it is still broken."""
    live = state(1)
    with Checkpointer(RUN, live, at=daemon.socket) as checkpointer:
        for step in (1, 2, 3, 4):
            train(live)
            if step >= 3:
                with torch.no_grad():
                    live["model"][0].weight[3, 5] = float("nan")
            checkpointer.save(step, metrics={"loss": 1 / step}).result()
            wait_until(lambda step=step: api.checkpoint(RUN, step).verified)
    return live


def test_statistics_are_those_of_what_is_restored(trained: dict, daemon: RunningDaemon, api: Api) -> None:
    """Every tensor of a real save, as numpy finds it in what the reader hands over."""
    held = {}
    for step in (1, 2):
        with DirectorySource(daemon.root / naming.checkpoint_path(RUN, step)) as source:
            reader = CheckpointReader.open(source)
            found = {(g, n): reader.read(g, n) for g, t in reader.manifest.tensors.items() for n in t}
            held[step] = {key: np.asarray(value).astype(np.float64) for key, value in found.items()}
    listed = list(api.statistics(RUN, 2))
    assert {(one.group, one.name) for one in listed} == set(held[2])
    for one in listed:
        now, before = held[2][one.group, one.name], held[1][one.group, one.name]
        finite = now[np.isfinite(now)]
        assert (one.nan, one.inf) == (np.isnan(now).sum(), np.isinf(now).sum())
        assert (one.minimum, one.maximum) == (finite.min(), finite.max())
        assert one.mean == pytest.approx(finite.mean(), rel=1e-5, abs=1e-6 * np.abs(finite).mean())
        assert one.rms == pytest.approx(np.sqrt((finite**2).mean()), rel=1e-5)
        with np.errstate(invalid="ignore"):
            moved = now - before
        assert one.change == pytest.approx(np.linalg.norm(moved[np.isfinite(moved)]), rel=1e-5)
        assert one.changed_from == 1


def test_the_nan_is_found_and_named(trained: dict, api: Api) -> None:
    """The mask is no fault; the weight is, at the very commit at which it broke and for as long as it is broken."""
    assert [api.checkpoint(RUN, step).healthy for step in (1, 2, 3, 4)] == [True, True, False, False]
    assert next(iter(api.statistics(RUN, 3, "model", "nonfinite", "weight"))).name == "0.weight"
    assert api.layers(RUN).layers["0"][2].nonfinite >= 1  # type: ignore[union-attr]
    assert api.checkpoint(RUN).state == "unhealthy"
    assert api.checkpoint(RUN, "latest-healthy").step == 2
    assert api.best(RUN, "loss").step == 2


def test_restoring_the_newest_healthy_one(trained: dict, daemon: RunningDaemon) -> None:
    """`restore(healthy=True)` goes back before the NaN; without it, the newest one is restored as ever."""
    live = state(2)
    with Checkpointer(RUN, live, at=daemon.socket) as checkpointer:
        assert checkpointer.restore(healthy=True) == 2
        assert torch.isfinite(live["model"][0].weight).all()
        assert checkpointer.restore() == 4
        assert torch.isnan(live["model"][0].weight).any()


def test_over_http_as_well(trained: dict, daemon: RunningDaemon) -> None:
    """A rank that shares no memory with the daemon asks the same question."""
    live = state(3)
    with Checkpointer(RUN, live, at=daemon.url) as checkpointer:
        assert checkpointer.restore(healthy=True) == 2


def test_none_is_healthy(daemon: RunningDaemon, api: Api) -> None:
    """Who asks for a healthy one is not sent back to the start where there are others only."""
    live = {"t": torch.tensor([float("nan")]), "model": nn.Linear(2, 2)}
    with torch.no_grad():
        live["model"].weight[0, 0] = float("nan")
    with Checkpointer("ill", live, at=daemon.socket) as checkpointer:
        assert checkpointer.restore(healthy=True) == 0
        checkpointer.save(1).result()
        wait_until(lambda: api.checkpoint("ill", 1).verified)
        with pytest.raises(NoSuchCheckpoint, match="known to be healthy"):
            checkpointer.restore(healthy=True)


def test_the_command_line(trained: dict, daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """`stats` shows and sorts, `ls --healthy` and RUN@latest-healthy leave the broken ones out."""
    monkeypatch.setenv("COLUMNS", "200")
    url = ("--url", daemon.url)
    shown = call("stats", f"{RUN}@3", "--sort", "nonfinite", "--group", "model", *url)
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert lines[0].split()[:4] == ["GROUP", "TENSOR", "DTYPE", "NAN"]
    assert {line.split()[1] for line in lines[1:3]} == {"mask", "0.weight"}
    found = json.loads(call("stats", f"{RUN}@3", "--name", "0.weight", "--first", 1, "--json", *url).stdout)
    assert [(one["name"], one["nan"]) for one in found] == [("0.weight", 1)]
    assert "No tensor of" in call("stats", f"{RUN}@latest-healthy", "--name", "nobody", *url).stdout
    listed = json.loads(call("ls", RUN, "--healthy", "--json", *url).stdout)
    assert [made["step"] for made in listed] == [2, 1]
    assert "unhealthy" in call("ls", RUN, *url).stdout
    assert json.loads(call("show", f"{RUN}@latest-healthy", "--json", *url).stdout)["step"] == 2
    assert " with NaN since step 3 (" in call("show", RUN, *url).stdout.splitlines()[1]
    for refused in (
        ("stats", daemon.root, *url),
        ("show", f"{RUN}@latest-healthy", "--root", daemon.root),
        ("show", f"{RUN}@best:loss", "--root", daemon.root),
    ):
        result = call(*refused, "--json")
        assert (result.exit_code, json.loads(result.stdout)["code"]) == (2, InvalidRequest.code)
    assert call("stats", f"{RUN}@77", *url).exit_code == 3


def test_the_best_on_the_command_line(trained: dict, daemon: RunningDaemon, api: Api) -> None:
    """RUN@best:METRIC is the best of the healthy ones in every command; RUN@best is that of the run's own `best` rule."""
    url = ("--url", daemon.url)

    def shown(name: str) -> int:
        result = call("show", f"{RUN}@{name}", "--json", *url)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)["step"]

    assert (shown("best:loss"), shown("best:loss:max")) == (2, 1)
    refused = call("show", f"{RUN}@best", *url)
    assert (refused.exit_code, f"{RUN}@best:loss" in refused.stderr) == (2, True)
    assert call("show", f"{RUN}@best:nothing", *url).exit_code == 3
    assert call("keep", RUN, "--last", 99, "--yes", "--best", "loss:1:max", *url).exit_code == 0
    assert shown("best") == 1
    assert call("keep", RUN, "--last", 99, "--yes", "--best", "loss:1:max", "--best", "loss:1", *url).exit_code == 0
    assert call("show", f"{RUN}@best", *url).exit_code == 2  # by either of them?
    assert len(json.loads(call("stats", f"{RUN}@best:loss", "--first", 1, "--json", *url).stdout)) == 1
    compared = json.loads(call("diff", f"{RUN}@best:loss:max", f"{RUN}@latest-healthy", "--fast", "--json", *url).stdout)
    assert (compared["a"], compared["b"]) == (f"{RUN}@1", f"{RUN}@2")
    for name, step in (("best:loss:max", 1), ("latest-healthy", 2), ("latest", 4)):
        submitted = json.loads(call("jobs", "submit", "verify", f"{RUN}@{name}", "--json", *url).stdout)
        assert submitted["step"] == step
    for command in ("rm", "pin"):
        assert call(command, f"{RUN}@best:loss", *url).exit_code == 2  # what goes or stays is never guessed
    with holdfast.open(f"{daemon.url}/v1/runs/{RUN}/checkpoints/latest-healthy") as opened:
        assert opened.step == 2
