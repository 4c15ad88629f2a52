"""The crash lab's own: its table after the last test."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import ledger


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what was tried, and write it down where --crash-report says."""
    found = ledger.lines()
    if found:
        terminalreporter.section("crash lab")
        for line in found:
            terminalreporter.write_line(line)
    report = config.getoption("--crash-report", default=None)
    if report:
        ledger.write(Path(report))
