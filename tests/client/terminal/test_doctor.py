"""doctor finds what would keep a machine from saving, and says what to do."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.terminal.doctor import Finding, examine
from holdfast.terminal.options import NamedRoot
from holdfast_formats.memory_bounds import Bound
from tests.checkpoints import build_root
from tests.serving import served

NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Finding]]:
    """Examine with the user's own directories and addresses out of the way."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("HOLDFAST_URL", "")
    monkeypatch.setattr("holdfast.config.DEFAULT_URL", NOBODY)

    def look(root: Path | None = None, url: str | None = None) -> dict[str, Finding]:
        return {finding.name: finding for finding in examine(None if root is None else NamedRoot(root), url)}

    return look


def test_healthy_machine(examined: Callable[..., dict[str, Finding]], tmp_path: Path) -> None:
    """With root, socket and service in place everything is looked at and nothing fails."""
    root = tmp_path / "root"
    build_root(root, {"tiny": (5,)})
    (tmp_path / "holdfast").mkdir()
    with served(root) as running, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "holdfast" / "holdfast.sock"))
        listener.listen()
        found = examined(root, running.url)
    assert set(found) >= {"python", "holdfast", "torch", "daemon", "memfd", "memory", "root", "disk", "write", "clock"}
    assert all(finding.status != "fail" for finding in found.values())
    assert found["socket"].status == found["service"].status == found["clock"].status == "ok"
    assert str(root) in found["service"].what
    assert {path.name for path in root.iterdir() if path.name.startswith(".holdfast-doctor")} == set()


def test_defaults_may_be_missing(examined: Callable[..., dict[str, Finding]]) -> None:
    """With no daemon and no directory yet there are warnings with advice, and no failure."""
    found = examined()
    assert [found[name].status for name in ("root", "socket", "service")] == ["warn"] * 3
    assert all(finding.advice for finding in found.values() if finding.status != "ok")


def test_the_root_of_the_daemon_at_the_default_address(
    examined: Callable[..., dict[str, Finding]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is checked without being named, as in a container; the root of a service that was named is not."""
    root = tmp_path / "root"
    build_root(root, {"tiny": (5,)})
    with served(root) as running:
        monkeypatch.setattr("holdfast.config.DEFAULT_URL", running.url)
        found = examined()
        assert (found["root"].status, found["root"].what) == ("ok", f"{root} is writable")
        assert found["write"].status in ("ok", "warn")
        assert "does not exist" in examined(url=running.url)["root"].what


def test_how_memory_is_copied(examined: Callable[..., dict[str, Finding]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the library for copies could be, and is not, there is advice; elsewhere nothing is said of it."""
    monkeypatch.setattr("holdfast.memory.native_copy._library", None)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    slow = examined()["copies"]
    assert slow.status == "warn" and "compiler" in slow.advice
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert "copies" not in examined()
    monkeypatch.setattr("holdfast.memory.native_copy._library", object())
    assert examined()["copies"].status == "ok"


def test_what_was_named_must_be_there(examined: Callable[..., dict[str, Finding]], tmp_path: Path) -> None:
    """A root or an address that was given and is not there is a failure."""
    found = examined(tmp_path / "nope", NOBODY)
    assert (found["root"].status, found["service"].status) == ("fail", "fail")


def test_unwritable_root(
    examined: Callable[..., dict[str, Finding]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A root that cannot be written is a failure, and no probe is tried there."""
    monkeypatch.setattr("os.access", lambda path, mode: False)
    found = examined(tmp_path)
    assert found["root"].status == "fail"
    assert "write" not in found


def test_memory_is_what_the_narrowest_limit_leaves(
    examined: Callable[..., dict[str, Finding]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits are those that a rank tells its daemon: the machine, its control groups, RLIMIT_AS."""
    bounds = [Bound("memory.max of /sys/fs/cgroup", 8 * 10**9, 10**9)]
    monkeypatch.setattr("holdfast_formats.memory_bounds.of_process", lambda: bounds)
    found = examined()["memory"]
    assert found.status == "warn" and "(memory.max of /sys/fs/cgroup)" in found.what and "container" in found.advice


def test_command(examined: Callable[..., dict[str, Finding]], tmp_path: Path) -> None:
    """The command prints every finding, and ends with 1 only when something failed."""
    fine = CliRunner().invoke(app, ["doctor", "--json"])
    assert fine.exit_code == 0
    assert {finding["status"] for finding in json.loads(fine.stdout)} <= {"ok", "warn"}
    broken = CliRunner().invoke(app, ["doctor", "--root", str(tmp_path / "nope")])
    assert broken.exit_code == 1
    assert "create it" in broken.stdout
