"""Programs from what callers give."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.layout import rules_choice
from holdfast.layout.rules_choice import program_of
from holdfast_formats.errors import InvalidRequest, LimitExceeded
from holdfast_formats.programs import load
from holdfast_formats.programs.choice import written


def test_a_program_in_every_form(tmp_path: Path) -> None:
    """A program, a file, a text and a name come to the same."""
    file = tmp_path / "mine.toml"
    file.write_text(written("hf-paddle"))
    wanted = load("hf-paddle")
    assert program_of(None) is None
    for given in (wanted, file, str(file), written("hf-paddle"), "hf-paddle"):
        assert program_of(given) == wanted
    assert program_of("hf-paddle-inverse") == load("hf-paddle-inverse")


def test_what_is_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is refused by its name."""
    file = tmp_path / "mine.toml"
    with pytest.raises(InvalidRequest, match=r"cannot read the program .*mine\.toml: No such file"):
        program_of(file)
    with pytest.raises(InvalidRequest, match="not int"):
        program_of(7)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="there is no program 'hf'"):
        program_of("hf")
    file.write_bytes(b"name = '\xff'")
    with pytest.raises(InvalidRequest, match="is not UTF-8"):
        program_of(file)
    file.write_text("a = 1  # long")
    monkeypatch.setattr(rules_choice, "PROGRAM_BYTES_MAX", 10)
    with pytest.raises(LimitExceeded, match="more than 10 bytes"):
        program_of(file)
