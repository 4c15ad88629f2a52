"""The service's program for roots that nobody serves, as `holdfast` calls it."""

from __future__ import annotations

import pytest

from holdfast_service.offline.__main__ import NAMES, main


@pytest.mark.parametrize("arguments", [[], ["rebuild"], ["--root", "x"]])
def test_a_program_that_there_is_not_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2, and what there is."""
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert all(name in said for name in NAMES)
