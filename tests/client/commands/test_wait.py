"""`holdfast wait --idle`: it ends when every save is written and verified, and not before."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from holdfast import Checkpointer
from holdfast.cli import app
from holdfast.rest.api import Api
from holdfast_service.config import notify_socket
from holdfast_service.wiring.watching import notify_ready
from tests.checkpoints import build_root
from tests.daemons import running
from tests.serving import served


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["wait", *arguments])


def test_waits_until_saves_are_verified(tmp_path: Path) -> None:
    """A slow disk is writing when it is asked; when it answers, the checkpoint is committed and verified."""
    flags = ("--write-bytes-per-second", "500000")  # four seconds, in which to ask
    with running(tmp_path / "root", *flags, listen="127.0.0.1:0") as daemon, Api(daemon.url) as api:
        with Checkpointer("llama", {"model": torch.nn.Linear(1000, 500)}, at=str(daemon.socket)) as checkpointer:
            ticket = checkpointer.save(1)
            assert api.nodes()[0].busy
            ended = json.loads(call("--idle", "--json", "--url", daemon.url).stdout)
            assert ended["idle"] and ended["seconds"] > 0
            assert api.checkpoint("llama", 1).verified
            ticket.result(60)
        assert not api.nodes()[0].busy


def test_gives_up(tmp_path: Path) -> None:
    """When the time is over, the exit status says so."""
    build_root(tmp_path, {"tiny": (1,)})
    with served(tmp_path) as service:
        busy = service.services.node().model_copy(update={"busy": True})
        with served(tmp_path / "other", node=lambda: busy) as occupied:
            ended = call("--idle", "--timeout", "0.3", "--url", occupied.url)
    assert (ended.exit_code, "deadline-exceeded" in ended.stderr) == (6, True)


def test_nobody_there_and_nothing_asked() -> None:
    """A daemon that is gone has nothing left to do; waiting for nothing in particular is refused."""
    assert call("--idle", "--url", "http://127.0.0.1:9").exit_code == 0
    assert call().exit_code == 2


@pytest.mark.parametrize("abstract", [False, True])
def test_service_manager_is_told(tmp_path: Path, abstract: bool) -> None:
    """READY=1 arrives at the socket that systemd names, in the file system or beside it."""
    address = f"@holdfast-{threading.get_native_id()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + address[1:] if abstract else address)
        manager.settimeout(60)
        notify_ready(address)
        assert manager.recv(100) == b"READY=1"


def test_no_service_manager(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One that does not listen is a warning; none at all is nothing."""
    notify_ready(str(tmp_path / "nobody"))
    assert "could not notify" in caplog.text
    assert notify_socket({}) is None and notify_socket({"NOTIFY_SOCKET": "/run/x"}) == "/run/x"
