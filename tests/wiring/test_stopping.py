"""What the daemon says to its service manager and in its log, from start to stop."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from holdfast import Checkpointer
from holdfast_service.daemon.saving.saver import Unwritten
from holdfast_service.observe.service_manager import ServiceManager
from holdfast_service.wiring import stopping
from holdfast_service.wiring.stopping import StopReport
from tests.daemons import running
from tests.kit.managers import manager_at


def test_from_start_to_stop(tmp_path: Path) -> None:
    """Each stage of the start may take its time; READY; signs of life; and at the stop, what is still to be written."""
    address = tmp_path / "notify"
    before = ("env", f"NOTIFY_SOCKET={address}", "WATCHDOG_USEC=2000000", "FDSTORE=0")
    flags = ("--write-bytes-per-second", "1000000")  # the save takes four seconds
    with manager_at(address) as manager, running(tmp_path / "root", *flags, before=before) as daemon:
        heard = [manager.recv(1000).decode() for _ in range(4)]
        with Checkpointer("llama", {"model": torch.nn.Linear(1000, 1000)}, at=str(daemon.socket)) as checkpointer:
            checkpointer.save(1, wait="staged")
            assert daemon.stop() == 0
            while not heard[-1].startswith("STOPPING=1"):
                heard.append(manager.recv(1000).decode())
    opening, taking, ready, alive = heard[:4]
    assert opening.startswith("STATUS=opening the catalog") and "EXTEND_TIMEOUT_USEC=300000000" in opening
    assert taking.startswith("STATUS=taking over") and "EXTEND_TIMEOUT_USEC=" in taking
    assert ready.startswith("READY=1\nSTATUS=serving ") and alive == "WATCHDOG=1"
    assert heard[-1] == "STOPPING=1\nSTATUS=stopping: waiting for 1 save, 4 MB"
    log = daemon.log.read_text()
    lines = [log.index(text) for text in ("SIGTERM: the daemon stops", "stopping: waiting for 1 save, 4 MB", "committed")]
    assert lines == sorted(lines) and re.search(r"stopped after \d+\.\d s", log[lines[-1] :])


def test_more_time_is_asked_for_while_bytes_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that writes may go on; one that hangs is left to the manager's own limit."""
    monkeypatch.setattr(stopping, "STILL_S", 0.0)
    left = [Unwritten(2, 64_000_000, 4e6)]
    said = ServiceManager(str(tmp_path / "notify"))
    with manager_at(tmp_path / "notify") as manager, StopReport(said, lambda: left[0], look_s=0.05):
        first = manager.recv(1000).decode()
        assert first == "STOPPING=1\nSTATUS=stopping: waiting for 2 saves, 64 MB, about 16 s"
        assert "EXTEND_TIMEOUT_USEC" not in manager.recv(1000).decode()
        monkeypatch.setattr(stopping, "STILL_S", 3600.0)
        left[0] = Unwritten(0, 0, 4e6)
        while "EXTEND_TIMEOUT_USEC=60000000" not in (last := manager.recv(1000).decode()):
            pass
        assert "no save is left to write" in last or "waiting for" in last


def test_a_daemon_without_stderr_serves(tmp_path: Path) -> None:
    """It is closed where a program detaches itself: then nothing is logged, and no stacks can be."""
    flags = [
        "--root",
        str(tmp_path / "root"),
        "--socket",
        str(tmp_path / "s"),
        "--listen",
        "none",
        "--exit-when-idle",
        "0.1",
    ]
    command = shlex.join([sys.executable, "-m", "holdfast_service", *flags])
    assert subprocess.run(["sh", "-c", f"exec {command} 2>&-"], timeout=180, check=False).returncode == 0
