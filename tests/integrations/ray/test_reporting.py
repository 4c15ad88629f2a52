"""E3 and E4: what Ray is given of a checkpoint, and what is refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.integrations import ray as holdfast_ray
from holdfast_formats import naming
from tests.integrations.environments import TOP
from tests.integrations.resuming import START_S


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What the program wrote down, by the name of the case, and its directory."""
    work = tmp_path_factory.mktemp("refusals")
    about = os.environ | {"PYTHONPATH": str(TOP), "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(work / "runtime")}
    command = [sys.executable, "-m", "tests.integrations.ray.refusals", str(work)]
    done = subprocess.run(command, env=about, cwd=TOP, capture_output=True, text=True, timeout=START_S * 2)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return dict(json.loads(line) for line in (work / "said.jsonl").read_text().splitlines()) | {"work": str(work)}


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("outside", "outside a Ray Train worker"),
        ("policy", "'newest-wins'"),
        ("temporary", "Ray session's directory"),
        ("world", "world size 1, but Ray Train has 2"),
        ("foreign", "was not saved by Holdfast"),
        ("another run", "step 2 of the run 'run', not of 'other'"),
    ],
)
def test_what_ray_could_not_rely_on_is_refused(said: dict[str, object], case: str, words: str) -> None:
    """E4: by name, before anything is saved."""
    assert str(said[case]).startswith("InvalidRequest") and words in str(said[case])
    assert not Path(str(said["work"]), "root", naming.checkpoint_path("drops", 1)).exists()


def test_rays_directory_shows_the_checkpoints_files(said: dict[str, object]) -> None:
    """E3: result.checkpoint.as_directory() has the files that from_pretrained reads, and assets."""
    files = said["files"]
    assert isinstance(files, list)
    assert {holdfast_ray.POINTER, "COMMIT", "extra.safetensors", "note.txt", naming.step_directory(2)} <= set(files)


def test_what_cannot_be_removed_ends_no_training(said: dict[str, object]) -> None:
    """A directory that a killed worker left behind: the link goes, the rest stays, and both reports were made."""
    assert said["left behind"] == [holdfast_ray.POINTER]
