"""One rank of several saves by itself: it waits for nobody, and a second one is refused."""

from __future__ import annotations

from pathlib import Path

from tests.daemons import running
from tests.torchruns import launch


def test_rank_0_saves_while_the_others_wait_for_it(tmp_path: Path) -> None:
    """As in frameworks in which only rank 0 saves. Two ranks that both try are told, and all can restore together."""
    with running(tmp_path / "root") as daemon:
        launch(2, "tests.distributed.alone_worker", str(daemon.socket))
