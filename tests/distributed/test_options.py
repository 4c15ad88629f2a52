"""The trainer's options on two real ranks, sharded and replicated."""

from __future__ import annotations

from pathlib import Path

from tests.daemons import running
from tests.torchruns import launch


def test_casts_masters_names_and_streams(tmp_path: Path) -> None:
    """What holds for one rank holds for each of two, under FSDP2 and DDP: the worker checks it."""
    with running(tmp_path / "root") as daemon:
        launch(2, "tests.distributed.options_worker", str(daemon.socket))
