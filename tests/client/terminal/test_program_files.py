"""A mapping program that a command is given: a file's text, or a name."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.terminal import program_files
from holdfast.terminal.program_files import program_text
from holdfast_formats.errors import InvalidRequest, LimitExceeded


def test_a_file_or_a_name(tmp_path: Path) -> None:
    """What looks like a path has to be there; any other word is the name of a program that is shipped."""
    (tmp_path / "mine.toml").write_text("name = '程序'\n", encoding="utf-8")
    assert program_text(str(tmp_path / "mine.toml")) == "name = '程序'\n"
    assert program_text("hf-paddle") == "hf-paddle"
    for missing in ("missing.toml", str(tmp_path / "missing"), "./hf-paddle"):
        with pytest.raises(InvalidRequest, match="there is no file"):
            program_text(missing)


def test_what_no_request_can_carry(tmp_path: Path) -> None:
    """A file that is too long, or is no text."""
    (tmp_path / "long.toml").write_text("#" * (program_files.PROGRAM_BYTES_MAX + 1))
    with pytest.raises(LimitExceeded, match="60000 bytes"):
        program_text(str(tmp_path / "long.toml"))
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        program_text(str(tmp_path / "bytes.toml"))
