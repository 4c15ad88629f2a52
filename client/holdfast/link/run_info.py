"""Collects a launch's metadata for its run: what the trainer passes as `info=`, and what can be detected safely.

Detected are the git commit, the command lines of this process and of its launcher without secrets, the working directory,
user, host, and the versions of Python and torch. The environment is never read. git runs in a thread; only the first
contact with the daemon waits for it.
"""

from __future__ import annotations

import json
import os
import platform
import pwd
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.link import git_commit
from holdfast.link.secrets import masked, masked_command
from holdfast.threads import own_threads
from holdfast_formats.errors import InvalidRequest, LimitExceeded
from holdfast_formats.staging.messages import INFO_BYTES_MAX
from holdfast_formats.tags import check_tags

COMMAND_CHARACTERS_MAX = 4096
WAIT_S = 0.1  # for git, at the first contact with the daemon, which may be in the first save; it began long before
INTEGER_MAX = 2**63 - 1
_TEXTS = ("owner", "notes")  # of these names, what is given is text


class RunInfo:
    """Collects from its construction on. Thread-safe."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        """`given` was checked. Its keys replace detected ones; None removes one."""
        self._given = given
        self._found = _found()
        self._asking: threading.Thread | None = None
        if "git" not in given:
            self._asking = own_threads.begin(self._ask_git, "holdfast-info")

    def document(self, wait_s: float = WAIT_S) -> dict[str, Any]:
        """All of it, as JSON values of at most 64 KiB, the given ones first; of git what is known within `wait_s`."""
        asking = self._asking
        if asking is not None:
            asking.join(wait_s)
            self._asking = None  # waited for once: a later result is sent at the next contact
        info = {name: value for name, value in {**self._found, **self._given}.items() if value is not None}
        if len(json.dumps(info)) > INFO_BYTES_MAX:
            info = {name: value for name, value in info.items() if name not in ("command", "launcher")}
        return info if len(json.dumps(info)) <= INFO_BYTES_MAX else dict(self._given)

    def _ask_git(self) -> None:
        directory = _program()
        commit = git_commit.commit_of(directory)
        if commit is not None:
            self._found = {**self._found, "git": commit}
            dirty = git_commit.is_dirty(directory)
            if dirty is not None:
                self._found = {**self._found, "git": {**commit, "dirty": dirty}}


def check(info: Mapping[str, Any] | None) -> dict[str, Any]:
    """`info=` as JSON values without secrets. `InvalidRequest` for what JSON cannot hold, `LimitExceeded` beyond 64 KiB."""
    if info is None:
        return {}
    if not isinstance(info, Mapping) or not all(isinstance(name, str) for name in info):
        raise InvalidRequest(f"info must be a mapping with text as keys, not {type(info).__name__}")
    for name in _TEXTS:
        if not isinstance(info.get(name, ""), str | None):
            raise InvalidRequest(f"info[{name!r}] must be text, not {type(info[name]).__name__}")
    _check_tags(info.get("tags"))
    try:
        values: dict[str, Any] = _well_formed(json.dumps(dict(info), allow_nan=False, default=_plain, ensure_ascii=False))
    except Exception as error:  # a user's config object may raise anything when read
        raise InvalidRequest(
            f"info cannot be stored: {type(error).__name__}: {error}",
            hint="use text, numbers, lists and mappings; of a config, what its to_dict() returns",
        ) from error
    if (large := _large(values)) is not None:
        raise InvalidRequest(f"info cannot be stored: {str(large)[:24]} is beyond 64 bits", hint="pass it as text")
    values = masked(values)
    size = len(json.dumps(values))
    if size > INFO_BYTES_MAX:
        raise LimitExceeded(
            f"info has {size} bytes of JSON, over the limit of {INFO_BYTES_MAX}",
            hint="leave out large values; pass files as assets=",
        )
    return values


def _check_tags(tags: Any) -> None:
    """`InvalidRequest` for tags that the run could not have, `LimitExceeded` for too many."""
    if tags is None:
        return
    if not isinstance(tags, (list, tuple)) or not all(isinstance(tag, str) for tag in tags):
        raise InvalidRequest(
            "info['tags'] must be a list of strings", hint='for example info={"tags": ["sweep:lr", "8-experts"]}'
        )
    check_tags(tags)


def _plain(value: Any) -> Any:
    """Converts paths, dtypes and devices to text. Other types are refused."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    if type(value).__module__.partition(".")[0] == "torch" and type(value).__name__ in ("dtype", "device"):
        return str(value)
    raise TypeError(f"a value of type {type(value).__name__} is not JSON")


def _well_formed(text: str) -> Any:
    """Replaces unpaired surrogates, as in file names that are not UTF-8, by `?`: they cannot be sent."""
    return json.loads(text.encode("utf-8", "replace"))


def _large(value: Any) -> int | None:
    """An integer outside the daemon's range."""
    if isinstance(value, int):
        return value if abs(value) > INTEGER_MAX else None
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((large_item for one in inner if (large_item := _large(one)) is not None), None)


def _found() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    return {
        "command": _without_secrets(sys.orig_argv),
        "launcher": _launcher(),
        "directory": _directory(),
        "user": _user(),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "torch": None if torch is None else str(torch.__version__),
    }


def _without_secrets(command: Sequence[str]) -> list[str]:
    words: list[str] = masked_command(_well_formed(json.dumps(list(command), ensure_ascii=False)))
    kept: list[str] = []
    for word in words:
        if sum(map(len, kept)) + len(word) > COMMAND_CHARACTERS_MAX:
            return [*kept, f"… and {len(words) - len(kept)} more"]
        kept.append(word)
    return kept


def _launcher() -> list[str] | None:
    """The command line of the parent process, if it ends in our script and its arguments, as torchrun's does."""
    script = sys.orig_argv[-len(sys.argv) :]
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().removesuffix(b"\0").split(b"\0")
    except OSError:  # it belongs to another user, or has ended
        return None
    command = [os.fsdecode(word) for word in words]
    # A forked process has its parent's command line.
    return _without_secrets(command) if command[-len(script) :] == script and command != sys.orig_argv else None


def _directory() -> str | None:
    try:
        return str(_well_formed(json.dumps(os.getcwd(), ensure_ascii=False)))
    except OSError:  # it was removed
        return None


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's user without an entry
        return str(os.getuid())


def _program() -> Path:
    """The directory of the training script, or the current one."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(main).resolve().parent if main else Path.cwd()
