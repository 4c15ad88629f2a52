"""A training that is killed and saves by torch.distributed.checkpoint."""

from __future__ import annotations

from tests.suites.adapter_suite import AdapterSuite, Case


class TestDcp(AdapterSuite):
    SCRIPT = "tests.integrations.dcp.train"
    KILLED = (
        Case("sync, workers", "--save sync --world 1 --workers 2"),
        *(Case(f"{how}, two ranks", f"--save {how} --world 2 --workers 0", 2) for how in ("sync", "thread", "process")),
    )
