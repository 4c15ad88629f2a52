"""A root is a directory, not a path: a copy of it, or what stands in its place, reaches neither its daemon nor its files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast import Checkpointer
from holdfast.link import unix_socket
from holdfast.link.roots import mark
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError, NotFound, StorageFailed
from holdfast_service.storage.posix import PosixTier
from tests.daemons import RunningDaemon, copy_served, running, runtime_directory, wait_until


def steps(root: Path) -> list[str]:
    directory = root / "run" / naming.CHECKPOINTS
    return sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else []


def state(value: float) -> dict[str, torch.nn.Module]:
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, value)
    return {"model": model}


def save(step: int, value: float, at: Path) -> Checkpointer:
    checkpointer = Checkpointer("run", state(value), at=at)
    if step > 1:
        checkpointer.goes_on_from(step - 1)
    checkpointer.save(step, wait="durable").result()
    return checkpointer


def about(root: Path) -> dict:
    return dict(json.loads((root / naming.DAEMON_FILE).read_bytes()))


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory for roots and sockets; the daemons that trainers start there end with the test."""
    with runtime_directory() as made:
        yield made
        for file in made.glob(f"*/{naming.DAEMON_FILE}"):
            pid = int(json.loads(file.read_bytes())["pid"])
            if bytes(made) in command_of(pid):
                os.kill(pid, signal.SIGTERM)
                wait_until(lambda pid=pid: not command_of(pid))


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_copy_of_a_served_root_gets_a_daemon_of_its_own(place: Path) -> None:
    """Saves into the copy stay in the copy, what is restored is the copy's, and the original's daemon is named and alone."""
    root, copy = place / "root", place / "copy"
    with save(1, 1.0, at=root), save(2, 2.0, at=root):
        copy_served(root, copy)
        shutil.rmtree(copy / naming.checkpoint_path("run", 2))
        live = state(0.0)
        with Checkpointer("run", live, at=copy) as other:
            assert other.restore() == 1, "the original has step 2, its copy has not"
            assert live["model"].weight.detach().eq(1.0).all()
            other.save(3, wait="durable").result()
            assert any(str(copy) in note and about(root)["socket"] in note for note in other.notices), other.notices
        assert (steps(root), steps(copy)) == (["step-00000001", "step-00000002"], ["step-00000001", "step-00000003"])
        assert about(root)["pid"] != about(copy)["pid"]
        assert mark(root).id != mark(copy).id  # type: ignore[union-attr]


def test_without_a_daemon_a_copy_is_read_itself(place: Path) -> None:
    """A rank that starts no daemon reads the directory that it was given, whatever daemon is named in there."""
    root, copy = place / "root", place / "copy"
    with save(1, 1.0, at=root):
        copy_served(root, copy)
        shutil.rmtree(copy / "run")
        for file in copy.glob("catalog.sqlite*"):  # it may know step 1 already, whose absence would be refused
            file.unlink()
        assert Checkpointer("run", state(0.0), at=copy).restore() == 0


def test_a_socket_that_another_roots_daemon_has_taken_is_not_the_roots(place: Path) -> None:
    """A daemon was killed, and another root's answers at its socket: the root's trainer starts one on its own root."""
    root, other = place / "root", place / "other"
    first = RunningDaemon(root)
    with save(1, 1.0, at=root):
        first.kill()
    with running(other, "--socket", str(first.socket)):
        with save(2, 2.0, at=root) as checkpointer:
            assert any(str(other) in note for note in checkpointer.notices), checkpointer.notices
        assert (steps(root), steps(other)) == (["step-00000001", "step-00000002"], [])


@pytest.mark.filterwarnings("ignore::holdfast.SaveWarning")  # of the step whose ticket fails, where it has one
def test_a_trainer_that_lost_its_daemon_goes_on_with_none_of_another_root(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next daemon at the socket serves another root: the trainer's saves fail by name, and none goes there."""
    monkeypatch.setattr(unix_socket, "MEND_S", 2.0)
    root, other = place / "root", place / "other"
    first = RunningDaemon(root)
    with save(1, 1.0, at=first.socket) as checkpointer:
        first.kill()
        with running(other, "--socket", str(first.socket)):
            with pytest.raises(CheckpointError, match="which is not the root"):
                checkpointer.save(2, wait="durable").result()
            assert steps(other) == []
        with running(root):
            checkpointer.save(3, wait="durable").result()
    assert steps(root)[-1] == "step-00000003"


SHORT = """
import sys
from holdfast_service import __main__ as main
main.ROOT_GONE_S = 1.0
sys.exit(main.main(sys.argv[1:]))
"""
RANK = """
import sys, time, torch
from holdfast import Checkpointer
checkpointer = Checkpointer("run", {"model": torch.nn.Linear(2, 2)}, at=sys.argv[1])
checkpointer.save(1, wait="durable")
print("saved", flush=True)
time.sleep(600)
"""


def test_a_daemon_for_trainers_ends_if_its_root_is_removed(place: Path) -> None:
    """Its rank was killed and may come again, and checks wait for a catalog that was removed too: nothing ends these."""
    root, socket = place / "root", place / "root.sock"
    words = ["--root", str(root), "--socket", str(socket), "--listen", "none", "--exit-when-idle", "300"]
    with subprocess.Popen([sys.executable, "-c", SHORT, *words], stderr=subprocess.DEVNULL) as daemon:
        wait_until(lambda: (root / naming.DAEMON_FILE).exists())
        rank = subprocess.Popen([sys.executable, "-c", RANK, str(socket)], stdout=subprocess.PIPE, text=True)
        assert rank.stdout is not None
        assert rank.stdout.readline() == "saved\n"
        root.rename(place / "moved")
        shutil.rmtree(place / "moved")
        time.sleep(3.0)
        assert daemon.poll() is None, "a rank is connected, whose saves fail by name"
        rank.kill()
        rank.communicate()
        wait_until(lambda: daemon.poll() is not None)
        assert daemon.returncode == 0


def test_a_directory_in_the_place_of_a_served_root_is_neither_read_nor_written(place: Path) -> None:
    """The root was moved away and something else put there: a restore does not read that, a save does not write there."""
    root = place / "root"
    with running(root) as daemon:
        checkpointer = save(1, 1.0, at=daemon.socket)
        root.rename(place / "moved")
        shutil.copytree(place / "moved", root)
        before = steps(root)
        try:
            with pytest.raises((StorageFailed, NotFound)):
                checkpointer.restore(step=1, prove_first=True)
            with pytest.raises(CheckpointError):
                checkpointer.save(2, wait="durable").result()
            assert steps(root) == before == ["step-00000001"]
        finally:
            shutil.rmtree(root)
            (place / "moved").rename(root)
            checkpointer.close(wait=False)


def test_a_root_keeps_its_id_by_whatever_path(tmp_path: Path) -> None:
    """A daemon gives an id once; renamed, or reached over a link, the root is the same. A copy that is served is not."""
    with running(tmp_path / "root"):
        first = mark(tmp_path / "root")
    assert first is not None and first.id
    (tmp_path / "root").rename(tmp_path / "renamed")
    (tmp_path / "link").symlink_to("renamed")
    with running(tmp_path / "link") as daemon:
        assert mark(tmp_path / "renamed") == first
        assert daemon.about["root"] == first.model_dump()
    shutil.copytree(tmp_path / "renamed", tmp_path / "copy")
    with running(tmp_path / "copy"):
        second = mark(tmp_path / "copy")
        assert second is not None and second.id not in ("", first.id)


def test_a_tier_does_nothing_to_what_took_its_roots_place(tmp_path: Path) -> None:
    """Reads and writes fail by name once another directory stands at the root's path, and go on when it is back."""
    tier = PosixTier(tmp_path / "root")
    tier.put("file", b"x")
    (tmp_path / "root").rename(tmp_path / "moved")
    (tmp_path / "root").mkdir()
    for act in (lambda: tier.put("other", b"y"), lambda: tier.list(""), lambda: tier.read("file")):
        with pytest.raises(StorageFailed, match="no longer the same directory"):
            act()
    (tmp_path / "root").rmdir()
    (tmp_path / "moved").rename(tmp_path / "root")
    assert tier.read("file") == b"x"
