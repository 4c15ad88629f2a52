"""A training with a Lightning Trainer that is killed."""

from __future__ import annotations

from pathlib import Path

from tests.integrations.resuming import Outcome
from tests.suites.adapter_suite import AdapterSuite, Case


class TestLightning(AdapterSuite):
    SCRIPT = "tests.integrations.lightning.train"
    KILLED = (
        Case("plain"),
        Case("workers", "--workers 2"),
        Case("persistent workers", "--workers 2 --persistent"),
        Case("draws", "--noisy"),
        Case("draws, accumulation", "--noisy --accumulate 3"),
        Case("epochs", "--every-epoch"),
        Case("steps", "--max-steps 60"),
        Case("stateful", "--stateful"),
        Case("stateful, draws", "--stateful --noisy"),
        Case("stateful, workers", "--stateful --workers 2"),
        Case("stream", "--stream"),
        Case("stream, stateful", "--stream --stateful"),
        Case("validation within epochs", "--validate --val-every 3"),
        Case("validation, plateau", "--validate --plateau"),
        Case("best", "--validate --best --val-every 6"),
        Case("two callbacks", "--validate --top"),
        Case("manual, two optimizers", "--manual"),
        Case("averaged", "--ema --validate --val-every 5"),
        Case("ddp", "--noisy --world 2", 2),
        Case("ddp, workers", "--workers 2 --world 2", 2),
        Case("ddp, stateful", "--stateful --world 2", 2),
        Case("fsdp2", "--strategy fsdp2 --world 2", 2),
    )

    def check(self, whole: Outcome, work: Path) -> None:
        """No two steps are alike."""
        assert len({str(lines) for lines in whole.steps.values()}) == max(whole.steps)
