"""The service's program for roots that nobody serves, as `holdfast` calls it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from holdfast_service.offline.__main__ import NAMES, main


@pytest.mark.parametrize("arguments", [[], ["rebuild"], ["--root", "x"]])
def test_a_program_that_there_is_not_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2, and what there is."""
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert all(name in said for name in NAMES)


@pytest.mark.parametrize(
    "words", [["repair", "r@1"], ["import", ".", "r@1"], ["merge", "r@1", "--recipe", "{}"], ["tokens", "create", "t"]]
)
def test_a_root_is_no_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """The program itself refuses it, whatever `holdfast` has looked at before: it would make a directory `s3:`."""
    monkeypatch.chdir(tmp_path)
    program, *rest = words
    assert main([program, "--root", "s3://bucket/place", *rest]) == 2
    assert "is a URL" in json.loads(capsys.readouterr().out)["detail"]
    assert os.listdir(tmp_path) == []
