"""Settings of the whole test suite."""

from __future__ import annotations

import pytest
from hypothesis import settings

# No deadlines: a busy machine must not turn a correct test red.
settings.register_profile("holdfast", deadline=None, derandomize=False, max_examples=60)
settings.load_profile("holdfast")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the crash lab; they must be known before its own settings are read."""
    parser.addoption("--crash-report", metavar="PATH", help="write the crash lab's table to this file, as JSON")
    parser.addoption(
        "--soak-s", metavar="SECONDS", type=float, help="end the soak after this long, however many saves it did"
    )
