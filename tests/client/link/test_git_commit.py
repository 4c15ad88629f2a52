"""The commit and whether files differ from it, of real repositories; nothing that a repository configures is run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from holdfast.link.git_commit import commit_of, is_dirty

QUIET = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
WHO = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]


def git(at: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", *WHO, *words], cwd=at, env={**os.environ, **QUIET}, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    made = tmp_path / "code"
    made.mkdir()
    git(made, "init", "-q", "-b", "trunk")
    (made / "train.py").write_text("one\n")
    git(made, "add", ".")
    git(made, "commit", "-q", "-m", "one")
    return made


def test_commit_branch_and_changes(repository: Path) -> None:
    """From a folder below, too; untracked files are no change, staged ones are."""
    below = repository / "a" / "b"
    below.mkdir(parents=True)
    head = git(repository, "rev-parse", "HEAD")
    assert commit_of(below) == {"commit": head, "branch": "trunk"} and is_dirty(below) is False
    (repository / "new.py").write_text("x")
    assert is_dirty(repository) is False
    git(repository, "add", "new.py")
    assert is_dirty(repository) is True
    git(repository, "commit", "-q", "-m", "two")
    (repository / "train.py").write_text("another\n")
    assert is_dirty(repository) is True


def test_packed_references_worktrees_and_no_branch(repository: Path, tmp_path: Path) -> None:
    head = git(repository, "rev-parse", "HEAD")
    git(repository, "pack-refs", "--all")
    assert commit_of(repository) == {"commit": head, "branch": "trunk"}
    git(repository, "worktree", "add", "-q", "-b", "side", str(tmp_path / "side"))
    assert commit_of(tmp_path / "side") == {"commit": head, "branch": "side"}
    git(repository, "checkout", "-q", "--detach")
    assert commit_of(repository) == {"commit": head}


def test_nothing_of_the_repository_is_run(repository: Path, tmp_path: Path) -> None:
    """Monitors, filters and hooks are programs that a repository names."""
    ran = tmp_path / "ran"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {ran}\ncat\n")
    program.chmod(0o755)
    git(repository, "config", "core.fsmonitor", str(program))
    git(repository, "config", "filter.f.clean", str(program))
    (repository / ".git" / "hooks").mkdir(exist_ok=True)
    (repository / ".git" / "info").mkdir(exist_ok=True)
    (repository / ".git" / "info" / "attributes").write_text("*.py filter=f\n")
    for hook in ("post-index-change", "fsmonitor-watchman"):
        (repository / ".git" / "hooks" / hook).write_bytes(program.read_bytes())
        (repository / ".git" / "hooks" / hook).chmod(0o755)
    ran.unlink(missing_ok=True)
    (repository / "train.py").write_text("two\n")
    assert is_dirty(repository) is True and commit_of(repository) is not None
    assert not ran.exists()


def test_an_object_that_is_missing_is_not_fetched(repository: Path, tmp_path: Path) -> None:
    """A partial clone fetches what it has not, by protocols that the repository allows by name: `ext::` is a program."""
    ran = tmp_path / "ran"
    for setting, value in (
        ("core.repositoryformatversion", "1"),
        ("extensions.partialClone", "origin"),
        ("remote.origin.promisor", "true"),
        ("remote.origin.url", f"ext::touch {ran}"),
        ("protocol.ext.allow", "always"),
    ):
        git(repository, "config", setting, value)
    tree = git(repository, "rev-parse", "HEAD")
    (repository / ".git" / "objects" / tree[:2] / tree[2:]).unlink()
    assert is_dirty(repository) is None and not ran.exists()


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(repository: Path) -> None:
    (repository / ".git" / "HEAD").unlink()
    os.mkfifo(repository / ".git" / "HEAD")
    assert commit_of(repository) is None


def test_what_is_no_repository_says_nothing(tmp_path: Path) -> None:
    """Nor does one that is broken, or leads elsewhere."""
    broken = tmp_path / "broken"
    (broken / ".git").mkdir(parents=True)
    assert commit_of(broken) is None
    for head in ("ref: ../../etc/passwd\n", "ref: refs/heads/x\n", "nonsense\n", ""):
        (broken / ".git" / "HEAD").write_text(head)
        assert commit_of(broken) is None
    (broken / ".git" / "refs" / "heads").mkdir(parents=True)
    (broken / ".git" / "refs" / "heads" / "x").write_text("ref: refs/heads/x\n")
    (broken / ".git" / "HEAD").write_text("ref: refs/heads/x\n")
    assert commit_of(broken) is None
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / ".git").write_text("gitdir: /nowhere\n")
    assert commit_of(linked) is None


def test_a_git_that_hangs_is_not_waited_for(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = tmp_path / "bin"
    hanging.mkdir()
    (hanging / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (hanging / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{hanging}:{os.environ['PATH']}")
    assert is_dirty(repository, wait_s=0.2) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert is_dirty(repository) is None
