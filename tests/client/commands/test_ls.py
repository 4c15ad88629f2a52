"""`holdfast ls --sort`: what a service sorts by, with a column of it, and what a directory alone can tell."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast_formats import naming
from tests.checkpoints import build_root
from tests.daemons import running, wait_until
from tests.kit import commands
from tests.serving import served

RUNS = {"big": (1, 2, 3), "high": (90,), "small": (4, 8)}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "200")
    build_root(tmp_path / "root", RUNS)
    return tmp_path / "root"


call = partial(commands.call, "ls")


def order(*words: str) -> list[str]:
    """The names, which are in the same order for programs."""
    made = call(*words)
    assert made.exit_code == 0, made.output
    names = [line.split()[0] for line in made.stdout.splitlines()[1:]]
    assert names == [run["name"] for run in json.loads(call(*words, "--json").stdout)]
    return names


def test_by_what_every_list_has(place: list[str]) -> None:
    assert order(*place) == order("--sort", "name", *place) == ["big", "high", "small"]
    assert order("--sort", "-name", *place) == ["small", "high", "big"]
    assert order("--sort", "-storage", *place) == order("--sort=-checkpoints", *place) == ["big", "small", "high"]
    assert order("--sort", "newest", *place) == ["big", "small", "high"]


def test_by_what_a_service_knows(root: Path) -> None:
    """It is shown; a run without it says so."""
    with served(root) as running:
        url = ("--url", running.url)
        assert set(order("--sort", "metric:loss", *url)) == set(RUNS)
        made = call("--sort", "-metric:loss", *url).stdout.splitlines()
        assert made[0].split()[-1] == "LOSS" and {line.split()[-1] for line in made[1:]} == {"2.5"}
        made = call("--sort", "age", *url).stdout.splitlines()
        assert made[0].split()[-1] == "AGE" and all(line.endswith("ago") for line in made[1:])
        assert all(line.split()[-1] == "-" for line in call("--sort", "stall", *url).stdout.splitlines()[1:])
        refused = call("--sort", "colour", *url)
        assert refused.exit_code == 2 and "cannot be sorted by 'colour'" in refused.output


def test_what_a_directory_cannot_tell_is_refused(root: Path) -> None:
    """By name, as is an order for the checkpoints of a run."""
    refused = call("--sort", "age", "--root", str(root))
    assert refused.exit_code == 2 and "use a service" in refused.output
    refused = call("big", "--sort", "-storage", "--root", str(root))
    assert refused.exit_code == 2 and "--sort sorts runs" in refused.output


def test_what_was_removed_by_hand_is_named(root: Path) -> None:
    """`ls` and `show` say of which steps nothing is left, and what copies them back; before, they were not there at all."""
    show = ["show", "small@8"]
    with running(root, listen="127.0.0.1:0") as daemon:
        shutil.rmtree(root / naming.checkpoint_path("small", 8))
        wait_until(lambda: "step 8 is gone" in call("small", "--url", daemon.url).stderr)
        listed = call("small", "--url", daemon.url)
        assert "holdfast repair small@8" in listed.stderr and listed.stdout.splitlines()[1].split()[0] == "4"
        shown = CliRunner().invoke(app, [*show, "--url", daemon.url])
        assert shown.exit_code == 3 and "something other than Holdfast removed it" in shown.stderr
        about = CliRunner().invoke(app, ["show", "small", "--url", daemon.url])
        assert "missing     step 8" in about.stdout
        assert "gone" not in call("big", "--url", daemon.url).stderr
