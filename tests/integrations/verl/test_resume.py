"""An actor and a critic that are killed, with verl."""

from __future__ import annotations

from pathlib import Path

from tests.integrations.resuming import Outcome, completed
from tests.suites.adapter_suite import AdapterSuite, Case


class TestVerl(AdapterSuite):
    SCRIPT = "tests.integrations.verl.train"
    KILLED = (
        Case("one rank", "--strategy fsdp2"),
        Case("FSDP2", "--strategy fsdp2", 2),
        Case("FSDP1", "--strategy fsdp", 2),
    )

    def check(self, whole: Outcome, work: Path) -> None:
        """max_ckpt_to_keep is 2."""
        for role in ("actor", "critic"):
            assert len([path for path in (work / "out").glob(f"*/{role}") if (path / "COMMIT").is_file()]) == 2

    def test_another_number_of_ranks_goes_on(self, tmp_path: Path) -> None:
        """E2: one rank loads what two have saved under FSDP1, and both roles go on from its step with the moments."""
        completed(self.SCRIPT, ("--strategy", "fsdp", "--last", "9"), tmp_path, world=2)
        assert completed(self.SCRIPT, ("--strategy", "fsdp2"), tmp_path).began == [0, 9]
