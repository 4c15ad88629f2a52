"""Reads a mapping program from a program, a file, its text, or the name of a shipped one."""

from __future__ import annotations

from pathlib import Path

from holdfast_formats.errors import InvalidRequest, LimitExceeded
from holdfast_formats.programs import Program, load, read_program

PROGRAM_BYTES_MAX = 60_000

ProgramSource = Program | Path | str | None  # a str is a program's text, the path of a .toml file, or a shipped one's name


def program_of(source: ProgramSource) -> Program | None:
    """The program; `InvalidRequest` for an unreadable or invalid one, `LimitExceeded` for a file that is too long."""
    if source is None or isinstance(source, Program):
        return source
    if isinstance(source, Path):
        return read_program(_read(source))
    if not isinstance(source, str):
        raise InvalidRequest(f"a program is a file, its text, or a shipped one's name, not {type(source).__name__}")
    if "\n" in source or "=" in source:
        return read_program(source)
    return read_program(_read(Path(source))) if source.endswith(".toml") else load(source)


def _read(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            encoded = file.read(PROGRAM_BYTES_MAX + 1)
        text = encoded.decode()
    except OSError as error:
        raise InvalidRequest(f"cannot read the program {path}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidRequest(f"{path} is not UTF-8: {error}") from error
    if len(encoded) > PROGRAM_BYTES_MAX:
        raise LimitExceeded(f"{path} has more than {PROGRAM_BYTES_MAX} bytes", hint="use patterns instead of single names")
    return text
