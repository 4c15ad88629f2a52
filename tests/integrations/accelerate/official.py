"""Runs tests of accelerate's own, unchanged, with every Accelerator attached to a run of its test.

    build/integrations/accelerate/bin/python -m tests.integrations.accelerate.official CLONE [pytest words]

CLONE is a checkout of accelerate's repository; nothing of it is kept here. This module is also the plugin that pytest loads.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from holdfast.integrations.accelerate import attach
from tests.daemons import running
from tests.integrations.environments import TOP

FILE = "test_state_checkpointing.py"


@pytest.fixture(autouse=True)
def holdfast_instead(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """`prepare()` attaches, as a script does in the line after it."""
    own = Accelerator.prepare
    attached: list[Accelerator] = []
    with running(tmp_path_factory.mktemp("official") / "root") as daemon:

        def prepare(accelerator: Accelerator, *given: Any, **options: Any) -> Any:
            prepared = own(accelerator, *given, **options)
            if getattr(accelerator, "holdfast", None) is None:
                attach(accelerator, "run", at=daemon.socket)
                attached.append(accelerator)
            return prepared

        monkeypatch.setattr(Accelerator, "prepare", prepare)
        yield
        for accelerator in attached:
            accelerator.end_training()


def main(clone: Path, words: list[str]) -> int:
    """Run the tests; the exit status of pytest."""
    about = os.environ | {"PYTHONPATH": str(TOP), "OMP_NUM_THREADS": "1"}
    plugin = ["-p", "tests.integrations.accelerate.official", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-v", "-W", "ignore", *plugin, str(clone / "tests" / FILE), *words]
    return subprocess.run(command, cwd=clone, env=about, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
