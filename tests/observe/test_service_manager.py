"""Messages to the service manager that started the daemon (sd_notify), and whose watchdog is meant."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from holdfast_service.config import service_manager, supervised_environment
from holdfast_service.observe.service_manager import ServiceManager
from tests.kit.managers import manager_at


@pytest.mark.parametrize("abstract", [False, True])
def test_an_address_is_a_path_or_a_name(tmp_path: Path, abstract: bool) -> None:
    address = f"@holdfast-{threading.get_native_id()}" if abstract else str(tmp_path / "notify")
    with manager_at("\0" + address[1:] if abstract else address) as manager:
        ServiceManager(address).ready("serving")
        assert manager.recv(100) == b"READY=1\nSTATUS=serving"


def test_no_service_manager(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One that does not listen is a warning; none at all is nothing."""
    ServiceManager(str(tmp_path / "nothing")).ready("serving")
    assert "cannot notify the service manager" in caplog.text
    ServiceManager(None, 1.0).alive()
    assert len(caplog.records) == 1


def test_a_manager_that_reads_nothing_does_not_hold_up_the_daemon(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is stopped, and its socket is full: the daemon goes on, and stops when it is asked to."""
    with manager_at(tmp_path / "notify"):
        manager = ServiceManager(str(tmp_path / "notify"))
        while not caplog.records:
            manager.ready("serving")
    assert "timed out" in caplog.text


def test_the_watchdog_of_another_process_is_not_ours(tmp_path: Path) -> None:
    assert service_manager({}) == (None, None)
    assert service_manager({"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "120000000"}) == ("/run/x", 120.0)
    assert service_manager({"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": str(os.getpid())}) == (None, 1.0)
    assert service_manager({"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}) == (None, None)
    assert service_manager({"WATCHDOG_USEC": "soon"}) == (None, None)
    below = supervised_environment(Path("/run/n"), 2.0, {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_PID": "1", "HOME": "/"})
    assert below == {"NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "2000000", "FDSTORE": "0", "HOME": "/"}
