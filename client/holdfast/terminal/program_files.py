"""A command's mapping program: a file of this machine, or the name of a shipped one."""

from __future__ import annotations

from pathlib import Path

from holdfast_formats.errors import InvalidRequest, LimitExceeded

PROGRAM_BYTES_MAX = 60_000  # what a job's request and a command line can carry


def program_text(given: str) -> str:
    """The text of a program's file; what is no file is the name of a shipped program.

    Raises `InvalidRequest` for a file that does not exist or is no text, `LimitExceeded` for one that is too long.
    """
    if not Path(given).is_file() and "/" not in given and not given.endswith(".toml"):
        return given
    return file_text(given, PROGRAM_BYTES_MAX, "pass a program's file, or the name of a shipped program")


def file_text(given: str, bytes_max: int, hint: str) -> str:
    """The text of a file; `InvalidRequest` if it does not exist or is no text, `LimitExceeded` if it is too long."""
    path = Path(given)
    if not path.is_file():
        raise InvalidRequest(f"there is no file {given}", hint=hint)
    if path.stat().st_size > bytes_max:
        raise LimitExceeded(
            f"{given} has more than {bytes_max} bytes", hint="pass a smaller file; a request of a job has this limit"
        )
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as error:
        raise InvalidRequest(f"{given} is not UTF-8: {error}") from error
