"""The first steps of a conversation with a daemon."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from holdfast.link import exchange
from holdfast_formats.errors import DaemonGone


def test_a_socket_is_reached_under_a_long_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be bound by a shorter one, from its directory; the absolute path is more than connect(2) takes."""
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s")
        listener.listen()
        monkeypatch.chdir("/")
        before = len(os.listdir("/proc/self/fd"))
        exchange.connect(deep / "s").close()
        assert len(os.listdir("/proc/self/fd")) == before
    for missing in (deep / "t", deep / "f" / "s"):
        with pytest.raises(DaemonGone, match="no daemon answers"):
            exchange.connect(missing)
