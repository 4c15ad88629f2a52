"""A service manager to which a daemon talks (sd_notify)."""

from __future__ import annotations

import socket
from pathlib import Path


def manager_at(path: Path | str) -> socket.socket:
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(path))
    manager.settimeout(180)
    return manager
