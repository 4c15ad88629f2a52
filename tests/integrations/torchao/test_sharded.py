"""torchao's optimizers under FSDP2 and tensor parallelism: the same training on as many ranks; exact on others where their
blocks are the same ones, else refused or quantised again.
"""

from __future__ import annotations

import pytest

from tests.daemons import RunningDaemon
from tests.kit.daemons import own_daemon
from tests.torchruns import launch

pytest.importorskip("torchao.optim")
WORKER = "tests.integrations.torchao.sharded_worker"
daemon = own_daemon(listen="none")


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_saved_by_two_ranks(daemon: RunningDaemon, kind: str) -> None:
    """Under FSDP2; restored on 2, 1 and 4 ranks as it was, and under tensor parallelism, which cuts columns."""
    for ranks, *words in ((2, "fsdp"), (2, "fsdp"), (1, "plain"), (4, "fsdp"), (2, "tp", "again")):
        launch(ranks, WORKER, str(daemon.socket), kind, *words)
