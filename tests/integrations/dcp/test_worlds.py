"""Every kind of parallelism, saved on some ranks and loaded on another number of them (E2); planners that keep plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.daemons import running
from tests.torchruns import launch

WORKER = "tests.client.integrations.dcp_worker"


@pytest.mark.parametrize(("saving", "loading"), [(2, 3), (3, 1)])
def test_another_number_of_ranks(saving: int, loading: int, tmp_path: Path) -> None:
    """Tensors and optimizer state of the whole are equal, bit by bit, also for a Checkpointer."""
    with running(tmp_path / "root") as daemon:
        launch(saving, WORKER, "save", str(daemon.root), str(tmp_path / "whole.pt"), "fsdp2,tp,ddp,again")
        launch(loading, WORKER, "load", str(daemon.root), str(tmp_path / "whole.pt"), "fsdp2,tp,ddp")
