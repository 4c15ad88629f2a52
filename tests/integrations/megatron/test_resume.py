"""A training with Megatron that is killed."""

from __future__ import annotations

from tests.suites.adapter_suite import AdapterSuite, Case


class TestMegatron(AdapterSuite):
    SCRIPT = "tests.integrations.megatron.train"
    KILLED = (
        Case("tp=2", "--tp 2", 2),
        Case("dp=2 distributed bf16", "--distributed --bf16", 2),
        Case("fp16", "--fp16 --distributed"),
    )
