"""The git commit of a directory, and whether files differ from it. Nothing of the repository is executed.

The commit is read from git's own files. `git diff-files` and `diff-index` report differences; filters, hooks, monitors
and networks are switched off.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WAIT_S = 2.0  # for git
SMALL_BYTES_MAX = 64 * 1024
PACKED_BYTES_MAX = 16 * 2**20
REFERENCES_MAX = 5  # from one to the next
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_QUIETLY = ("--no-optional-locks", "--no-pager")
_SETTINGS = ("core.fsmonitor=false", "core.hooksPath=/dev/null", "protocol.allow=never", "submodule.recurse=false")
# A repository may allow protocols, and git fetches missing objects: `ext::` would run a command. This overrides it.
_ABOUT = ("GIT_ALLOW_PROTOCOL=none", "GIT_NO_LAZY_FETCH=1")
_OF_ANOTHER = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR")  # where a hook trains
_FILTERS = ("config", "--null", "--name-only", "--get-regexp", r"^filter\..*\.(clean|process)$")
_QUESTIONS = (("diff-index", "--cached", "--name-only", "HEAD"), ("diff-files", "--name-only"))


def commit_of(directory: Path) -> dict[str, Any] | None:
    """`commit` and `branch`, as far as there are any, of the repository that holds a directory; None outside of one."""
    try:
        for at in (directory, *directory.parents):
            repository = at / ".git"
            if repository.is_dir():
                return _head(repository, repository)
            if repository.is_file():
                return _of_link(repository)
    except (OSError, ValueError):
        return None
    return None


def is_dirty(directory: Path, wait_s: float = WAIT_S) -> bool | None:
    """Whether tracked files differ from the commit; None if git is missing or too slow."""
    git, env = shutil.which("git"), shutil.which("env")
    if git is None or env is None:
        return None
    unset = [word for name in _OF_ANOTHER for word in ("-u", name)]
    asking = [env, *unset, *_ABOUT, git, "-C", str(directory), *_QUIETLY, *_given(_SETTINGS)]
    filters = _answer([*asking, *_FILTERS], wait_s, nothing=1)
    if filters is None:
        return None
    asking += _given(f"{name}=" for name in filters.split("\0") if name)  # a filter that is no program is none
    for question in _QUESTIONS:
        names = _answer([*asking, question[0], "--ignore-submodules=all", *question[1:]], wait_s)
        if names is None:
            return None
        if names:
            return True
    return False


def _given(settings: Iterable[str]) -> list[str]:
    return [word for setting in settings for word in ("-c", setting)]


def _answer(command: list[str], wait_s: float, nothing: int = 0) -> str | None:
    """git's output, None on failure; `nothing` is its status for no output."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=wait_s, check=False, start_new_session=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace") if done.returncode in (0, nothing) else None


def _of_link(file: Path) -> dict[str, Any] | None:
    """The git directory of a worktree or submodule, where `.git` is a file."""
    target = _text(file).partition("gitdir:")[2].strip()
    if not target:
        return None
    at = (file.parent / target).resolve()
    common = at / "commondir"
    return _head(at, (at / _text(common).strip()).resolve() if common.is_file() else at)


def _head(at: Path, common: Path) -> dict[str, Any] | None:
    head = _text(at / "HEAD").strip()
    branch = head.partition("ref:")[2].strip()
    for _ in range(REFERENCES_MAX):
        name = head.partition("ref:")[2].strip()
        if not name:
            break
        if ".." in name or name.startswith("/"):
            return None
        head = _reference(at, common, name)
    if not _COMMIT.fullmatch(head):
        return None
    short = branch.removeprefix("refs/heads/")
    return {"commit": head, **({"branch": short} if short else {})}


def _reference(at: Path, common: Path, name: str) -> str:
    for directory in (at, common):
        if (directory / name).is_file():
            return _text(directory / name).strip()
    packed = common / "packed-refs"
    lines = _text(packed, PACKED_BYTES_MAX).splitlines() if packed.is_file() else []
    return next((line.split(" ", 1)[0] for line in lines if line.endswith(f" {name}")), "")


def _text(path: Path, most: int = SMALL_BYTES_MAX) -> str:
    """The beginning of a regular file; `OSError` for anything else, because reading a pipe would block."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), encoding="utf-8", errors="replace") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is not a plain file")
        return file.read(most)
