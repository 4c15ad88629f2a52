"""A training with accelerate that is killed."""

from __future__ import annotations

from tests.suites.adapter_suite import AdapterSuite, Case


class TestAccelerate(AdapterSuite):
    SCRIPT = "tests.integrations.accelerate.train"
    KILLED = (
        Case("plain"),
        Case("workers", "--workers 2"),
        Case("accumulation, draws", "--accumulate 3 --noisy"),
        Case("stateful", "--stateful"),
        Case("stateful, workers", "--stateful --workers 2"),
        Case("stateful, draws", "--stateful --noisy"),
        Case("two ranks, seedable, workers", "--seedable --workers 2", 2),
        Case("two ranks, draws", "--noisy", 2),
    )
