"""The marks of the Makefile lie in the environment, and `make --jobs` runs their rules at once."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_tools_are_marked_in_an_environment_that_is_not_there_yet(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "tools.sh").write_text("exit 0\n")
    slow_python = tmp_path / "slow-python"  # makes what `python -m venv DIRECTORY` makes, after the tools are there
    slow_python.write_text('#!/bin/sh\nsleep 0.2\nmkdir -p "$3/bin"\ntouch "$3/bin/python"\n')
    slow_python.chmod(0o755)
    command = ["make", "--jobs", "2", f"PYTHON={slow_python}", ".venv/.tools"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / ".venv" / ".tools").exists()
