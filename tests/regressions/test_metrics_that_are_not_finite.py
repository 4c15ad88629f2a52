"""A loss of NaN is stored with its checkpoint and shown as NaN everywhere. Before, it was left out, as if none was given."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch

from holdfast import Api, Checkpointer
from holdfast_formats import naming
from tests.daemons import RunningDaemon, running, wait_until
from tests.kit.commands import call

METRICS = {"loss": math.nan, "most": math.inf, "least": -math.inf, "lr": 0.5}
WORDS = {"loss": "NaN", "most": "Infinity", "least": "-Infinity", "lr": 0.5}


class OldManifest(msgspec.Struct):
    """How a reader that is older than the field declares the metrics of a manifest."""

    metrics: dict[str, float]


def strict(text: str) -> Any:
    """The JSON document; fails for the constants that only Python's JSON has."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def check(daemon: RunningDaemon, run: str) -> None:
    """Service, commands and page agree about the newest checkpoint."""
    for path in (f"/v1/runs/{run}/checkpoints/2", f"/v1/runs/{run}/summary"):
        assert strict(httpx.get(daemon.url + path).text)["metrics"] == WORDS, path
    (made, *_) = strict(call("ls", run, "--url", daemon.url, "--json").stdout)
    assert made["metrics"] == WORDS
    assert strict(call("show", f"{run}@2", "--root", daemon.root, "--json").stdout)["metrics"] == WORDS
    shown = call("ls", run, "--url", daemon.url).stdout + call("show", f"{run}@2", "--url", daemon.url).stdout
    assert "loss=NaN" in shown and "most=Infinity" in shown and "least -Infinity" in shown
    assert ">NaN</span>" in httpx.get(f"{daemon.url}/runs/{run}").text
    drawn = strict(httpx.get(f"{daemon.url}/runs/{run}/saves").text)
    assert drawn["saves"]["metrics"]["loss"][-1] == "NaN" and {"step": 2, "what": "loss is NaN at"} in drawn["marks"]
    with Api(daemon.url) as api:
        assert math.isnan(api.checkpoint(run, 2).metrics["loss"]), "the client reads the number"


def test_a_loss_of_nan_is_shown_as_nan(tmp_path: Path) -> None:
    """After the save, for a daemon that has lost its catalog, and in another root that imports the checkpoint."""
    root = tmp_path / "root"
    with running(root, listen="127.0.0.1:0") as daemon:
        with Checkpointer("r", {"w": torch.ones(3)}, at=daemon.socket) as checkpointer:
            checkpointer.save(1, metrics={"loss": 3.0}, wait="durable")
            checkpointer.save(2, metrics=METRICS, wait="durable")
        with Api(daemon.url) as api:
            wait_until(lambda: api.checkpoint("r", 2).verified)
        check(daemon, "r")
        assert call("show", "r@best:loss", "--url", daemon.url).stdout.split()[0].endswith("r@1")
        daemon.kill()
    for catalog in root.glob("catalog.sqlite*"):
        catalog.unlink()
    with running(root, listen="127.0.0.1:0") as daemon:
        check(daemon, "r")
    made = root / naming.checkpoint_path("r", 2)
    manifest = (made / naming.MANIFEST).read_bytes()
    assert strict(manifest.decode())["nonfinite_metrics"] == {name: WORDS[name] for name in ("loss", "most", "least")}
    assert msgspec.json.decode(manifest, type=OldManifest).metrics == {"lr": 0.5}, "older readers see the finite ones"
    other = tmp_path / "other"
    assert call("import", made, "copied@2", "--root", other).exit_code == 0
    with running(other, listen="127.0.0.1:0") as daemon:
        check(daemon, "copied")
