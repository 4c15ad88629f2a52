"""Runs DeepSpeed's own tests of checkpoints with Holdfast installed, and prints a table of their results.

    build/integrations/deepspeed/bin/python -m tests.integrations.deepspeed.official.runner CLONE [-k EXPRESSION]

CLONE is a clone of DeepSpeed's repository at the release that is installed. The tests are run as they stand there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.integrations.environments import TOP

FILES = ("test_zero_optimizer.py", "test_lr_scheduler.py")


def main(clone: Path, words: list[str]) -> int:
    """Run the tests; the exit status of pytest."""
    with TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        about = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(TOP), str(clone / "tests")]),
            "DS_ACCELERATOR": "cpu",
            "LOCAL_SIZE": "2",
            "DS_UNITTEST_TIMEOUT": "1800",  # the first test compiles DeepSpeed's Adam
            "OMP_NUM_THREADS": "1",
            "HOLDFAST_OFFICIAL": str(Path(directory, "checkpoints")),
        }
        plugin = ["-p", "tests.integrations.deepspeed.official.plugin", "-p", "no:cacheprovider"]
        files = [str(clone / "tests" / "unit" / "checkpoint" / name) for name in FILES]
        command = [sys.executable, "-m", "pytest", "-q", "-W", "default", *plugin, f"--junitxml={report}", *files, *words]
        status = subprocess.run(command, cwd=clone / "tests", env=about, check=False).returncode
        print(table(report))
    return status


def table(report: Path) -> str:
    """One line for each test: its name, how it ended, and why if it did not pass."""
    lines = []
    for case in ET.parse(report).iter("testcase"):
        if case.get("name") in (None, "None"):
            continue
        ended = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        how = "passed" if ended is None else ended.tag
        why = "" if ended is None else (ended.get("message") or "").splitlines()[0][:160]
        lines.append(f"| {case.get('classname', '').rpartition('.')[2]}.{case.get('name')} | {how} | {why} |")
    return "\n".join(["| test | result | why |", "|---|---|---|", *lines])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
