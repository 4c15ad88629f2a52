"""Lowers the priority of background threads: CPU and I/O belong to training."""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress

# Not the lowest: a thread that never runs while it holds the interpreter's lock would hold up the daemon's answers.
NICE = 10
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS = 1  # a thread, when its id is given
_IOPRIO_IDLE = 3 << 13
_libc = ctypes.CDLL(None, use_errno=True)


def give_way() -> None:
    """Permanently lower the calling thread's priority: nice for the CPU, the idle class for I/O. It never fails."""
    lower(NICE)
    number = _IOPRIO_SET.get(os.uname().machine)
    if number is not None:
        _libc.syscall(number, _IOPRIO_WHO_PROCESS, threading.get_native_id(), _IOPRIO_IDLE)


def lower(nice: int) -> None:
    """Permanently lower the calling thread's priority for the CPU, unless it is lower already. It never fails."""
    thread = threading.get_native_id()
    with suppress(OSError):
        lowest = max(nice, os.getpriority(os.PRIO_PROCESS, thread))  # a daemon may be started with less than that
        os.setpriority(os.PRIO_PROCESS, thread, lowest)
