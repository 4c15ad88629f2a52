"""`holdfast merge` with a root and with a service, averages of a run's last steps, and the ancestry that `show` draws."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from holdfast_formats import naming
from tests.checkpoints import build
from tests.daemons import running
from tests.kit.commands import call, call_json
from tests.serving import served

pytestmark = pytest.mark.usefixtures("forked_programs")

STEPS = (1, 2, 3, 4)
RECIPE = """
merge_method: task_arithmetic
base_model: tiny@1
models: [{model: tiny@4}]
parameters: {weight: 0.5}
"""


def arrays(step: int) -> dict[str, np.ndarray]:
    chance = np.random.default_rng(step)
    return {"layers.0.w": chance.standard_normal((8, 6), np.float32), "norm.w": chance.standard_normal(6, np.float32)}


@pytest.fixture
def root(tmp_path: Path, no_service: None) -> Path:
    """A root with a run of four steps, and no service."""
    for step in STEPS:
        directory = tmp_path / "root" / naming.checkpoint_path("tiny", step)
        build(directory, {"model": arrays(step), "extra": {}}, step=step)
    (tmp_path / "recipe.yml").write_text(RECIPE)
    return tmp_path / "root"


def check_average(root: Path, step: int, steps: tuple[int, ...]) -> None:
    found = load_file(root / naming.checkpoint_path("average", step) / "model.safetensors")
    for name in arrays(1):
        wanted = np.mean([arrays(one)[name].astype(np.float64) for one in steps], axis=0)
        assert np.abs(found[name] - wanted).max() < 1e-6


@pytest.mark.parametrize("way", ["root", "url"])
def test_the_last_steps_of_a_run(root: Path, way: str) -> None:
    """Their mean; the recipe that is stored names them."""
    with served(root) as service:
        if way == "root":
            shutil.copytree(root, other := root.parent / "other", ignore=shutil.ignore_patterns(".holdfast*", "catalog*"))
        where = ["--root", str(other)] if way == "root" else ["--url", service.url]
        said = call("merge", "--average-last", "2", "tiny", "average@4", *where)
        assert said.exit_code == 0 and "merged" in said.output and "2 sources" in said.output, said.output
        shown = call_json("show", "average@4", *where)
        too_many = call("merge", "--average-last", "5", "tiny", "average@5", *where)
    assert [model["model"] for model in shown["origin"]["models"]] == ["tiny@4", "tiny@3"]
    assert too_many.exit_code == 3 and "not 5" in too_many.output
    check_average(other if way == "root" else root, 4, (3, 4))


def test_a_recipe(root: Path, tmp_path: Path) -> None:
    """A dry run writes nothing; a merge of merges has an ancestry, as far as it is there."""
    where = ["--root", str(root)]
    recipe = tmp_path / "recipe.yml"
    dry = call("merge", recipe, "merged@4", "--dry-run", *where)
    assert dry.exit_code == 0 and "nothing was written" in dry.output
    assert not (root / "merged" / naming.CHECKPOINTS).exists()
    done = call_json("merge", recipe, "merged@4", *where)
    assert done["tensors"] == 2 and done["source"]["method"] == "task_arithmetic"
    again = call("merge", recipe, "merged@4", *where)
    assert again.exit_code == 0  # the same merge is already there
    recipe.write_text(RECIPE + "seed: 1\n")
    assert call("merge", recipe, "merged@4", *where).exit_code == 4
    recipe.write_text("{merge_method: slerp, base_model: merged@4, models: [{model: tiny@2}], parameters: {t: 0.3}}")
    assert call("merge", recipe, "merged@5", *where).exit_code == 0
    drawn = call("show", "merged@5", *where).output
    lines = [line for line in drawn.splitlines() if "merged  " in line or "COMMIT" in line]
    named = [line.split()[0] for line in lines]
    assert named == ["merged", "merged@4", "merged", "tiny@1", "tiny@4", "tiny@2"]
    with served(root) as service:
        assert call("show", "merged@5", "--url", service.url).output.count("COMMIT") == 4
    shutil.rmtree(root / naming.checkpoint_path("merged", 4))
    assert "no longer exists" in call("show", "merged@5", *where).output


def test_refusals(root: Path, tmp_path: Path) -> None:
    """By key and line; what has no meaning together is not taken."""
    where, recipe = ["--root", str(root)], tmp_path / "recipe.yml"
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(RECIPE.replace("weight", "wieght"))
    said = call("merge", wrong, "merged@4", *where)
    assert said.exit_code == 2 and "line 5" in said.output and "did you mean weight" in said.output
    for words in (
        [tmp_path / "none.yml", "merged@4", *where],
        [recipe, "merged@4", "--dtype", "float32", *where],
        [recipe, "merged@4", "--url", "http://x", *where],
        ["tiny@2", "merged@4", "--average-last", "2", *where],
        [recipe, "merged", *where],
    ):
        assert call("merge", *words).exit_code == 2, words
    wrong.write_bytes(b"\xff")
    assert call("merge", wrong, "merged@4", *where).exit_code == 2
    wrong.write_text("#" * 40_000)
    assert call("merge", wrong, "merged@4", *where).exit_code == 2


def test_a_daemon(root: Path, tmp_path: Path) -> None:
    """It does the merge for a command of its user, and as a job, which the list of jobs shows."""
    with running(root, "--loopback-open", listen="127.0.0.1:0") as daemon:
        where = ["--url", daemon.url]
        assert call("merge", tmp_path / "recipe.yml", "merged@3", *where).exit_code == 0
        assert call_json("jobs", "ls", *where) == []
        recipe = f"recipe={(tmp_path / 'recipe.yml').read_text()}"
        assert call("jobs", "submit", "merge", "merged@4", "-a", recipe, "--follow", *where).exit_code == 0
        listed = call_json("jobs", "ls", "--kind", "merge", *where)
        assert [(job["kind"], job["state"], job["run"], job["step"]) for job in listed] == [("merge", "done", "merged", 4)]
        assert listed[0]["done_bytes"] == listed[0]["total_bytes"] > 0
        assert call("merge", tmp_path / "recipe.yml", "merged@5", "--root", root).exit_code == 0
    assert not os.listdir(root / "merged" / naming.STAGING)
