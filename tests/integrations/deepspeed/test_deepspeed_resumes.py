"""Trainings with DeepSpeed that are killed, with each optimizer that it wraps around the user's."""

from __future__ import annotations

from tests.suites.adapter_suite import AdapterSuite, Case


class TestDeepSpeed(AdapterSuite):
    SCRIPT = "tests.integrations.deepspeed.train"
    KILLED = (
        Case("zero-1", "--stage 1 --steps 20", 2),
        Case("zero-3", "--stage 3 --workers 2 --steps 20", 2),
        Case("zero-0", "--stage 0 --steps 10", kills=1),
        Case("zero-0 fp16", "--stage 0 --kind fp16 --steps 10", kills=1),
        Case("zero-1 accumulated", "--stage 1 --accumulate 2 --steps 10", kills=1),
        Case("zero-2 fp16", "--stage 2 --kind fp16 --steps 10", 2, kills=1),
        Case("zero-3 fp16", "--stage 3 --kind fp16 --steps 10", kills=1),
        Case("zero-2 offloaded", "--stage 2 --kind offloaded --steps 10", kills=1),
        Case("zero-3 offloaded", "--stage 3 --kind offloaded --steps 10", kills=1),
        Case("zero-2 bf16", "--stage 2 --kind bf16 --steps 10", 2, kills=1),
        Case("zero-3 bf16", "--stage 3 --kind bf16 --steps 10", 2, kills=1),
        Case("bf16 optimizer", "--stage 1 --kind bf16-accumulated --steps 10", 2, kills=1),
    )
