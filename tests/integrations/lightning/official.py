"""Runs tests of Lightning's own, unchanged, with Holdfast in the place of its callback and its CheckpointIO.

    build/integrations/lightning/bin/python -m tests.integrations.lightning.official CLONE [pytest words]

CLONE is a checkout of Lightning's repository; nothing of it is kept here. This module is also the plugin that pytest loads.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch.trainer.connectors.callback_connector as connector
import pytest
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from holdfast.integrations.lightning import HoldfastCheckpoint, HoldfastCheckpointIO
from tests.daemons import running
from tests.integrations.environments import TOP

FILES = ("plugins/test_checkpoint_io_plugin.py", "checkpointing/test_trainer_checkpoint.py")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "flaky: repeated by a plugin that is not needed here")


@pytest.fixture(autouse=True)
def holdfast_instead(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Each test has a run of its own."""
    with running(tmp_path_factory.mktemp("official") / "root") as daemon:

        class Callback(HoldfastCheckpoint):
            def __init__(self, *arguments: Any, **options: Any) -> None:
                names = ("dirpath", "filename", "monitor")
                super().__init__("run", at=daemon.socket, **dict(zip(names, arguments, strict=False)), **options)

        class Plugin(HoldfastCheckpointIO):
            def __init__(self) -> None:
                super().__init__("run", at=daemon.socket)

        if hasattr(request.module, "CustomCheckpointIO"):
            monkeypatch.setattr(request.module, "CustomCheckpointIO", Plugin)
            if request.node.name == "test_async_checkpoint_plugin":
                monkeypatch.setattr(request.module, "AsyncCheckpointIO", lambda: AsyncCheckpointIO(Plugin()))
        else:
            monkeypatch.setattr(request.module, "ModelCheckpoint", Callback)
            monkeypatch.setattr(connector, "ModelCheckpoint", Callback)  # what a Trainer makes by itself
        yield


def main(clone: Path, words: list[str]) -> int:
    """Run the tests; the exit status of pytest."""
    tests = clone / "tests"
    about = os.environ | {"PYTHONPATH": os.pathsep.join([str(TOP), str(tests)]), "OMP_NUM_THREADS": "1"}
    plugin = ["-p", "tests.integrations.lightning.official", "-p", "no:cacheprovider"]
    files = [str(tests / "tests_pytorch" / name) for name in FILES]
    command = [sys.executable, "-m", "pytest", "-v", "-W", "default", *plugin, *files, *words]
    return subprocess.run(command, cwd=tests, env=about, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
