"""A training with torchtitan that is killed."""

from __future__ import annotations

from tests.suites.adapter_suite import AdapterSuite, Case


class TestTorchtitan(AdapterSuite):
    SCRIPT = "tests.integrations.torchtitan.train"
    KILLED = (
        Case("workers", "--workers 2"),
        Case("two ranks, accumulation", "--accumulate 2", 2),
    )
