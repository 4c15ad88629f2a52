"""The marks of the Makefile lie in the environment, `make --jobs` runs their rules at once, and each test is in a lane."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_tools_are_marked_in_an_environment_that_is_not_there_yet(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "tools.sh").write_text("exit 0\n")
    slow_python = tmp_path / "slow-python"  # makes what `python -m venv DIRECTORY` makes, after the tools are there
    slow_python.write_text('#!/bin/sh\nsleep 0.2\nmkdir -p "$3/bin"\ntouch "$3/bin/python"\n')
    slow_python.chmod(0o755)
    command = ["make", "--jobs", "2", f"PYTHON={slow_python}", ".venv/.tools"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / ".venv" / ".tools").exists()


def test_every_test_that_make_test_leaves_out_is_in_a_lane(request: pytest.FixtureRequest) -> None:
    """The lanes of a mark stand in its description: a file that has the mark lies under a path that one of them is given."""
    outside = list[str]()
    for described in request.config.getini("markers"):
        lanes = re.search(r"^(\w+): .*\(make ([\w, ]+)\)$", described)
        if lanes is None:
            continue  # a mark of pytest or of a plugin
        mark, paths = lanes[1], [path for lane in lanes[2].split(", ") for path in _paths(lane)]
        for file in (ROOT / "tests").rglob("test_*.py"):
            if re.search(rf"\bmark\.{mark}\b", file.read_text()) and not any(file.is_relative_to(path) for path in paths):
                outside.append(f"{mark}: {file.relative_to(ROOT)}")
    assert not outside


def _paths(lane: str) -> list[Path]:
    """The files and folders of tests that a target of the Makefile gives to pytest; all of them where it names none."""
    said = subprocess.run(
        ["make", "--dry-run", lane], cwd=ROOT, capture_output=True, text=True, timeout=180, check=True
    ).stdout
    (command,) = (line for line in said.splitlines() if "-m pytest" in line)
    return [ROOT / word for word in command.split() if word.startswith("tests/")] or [ROOT / "tests"]
