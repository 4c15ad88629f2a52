"""What rank 0 answers for all ranks."""

from __future__ import annotations

from tests.torchruns import launch


def test_errors_reach_every_rank() -> None:
    """Whatever rank 0 raises, the others are told at once, rather than after the time that an answer may take."""
    launch(2, "tests.distributed.answers_worker")
