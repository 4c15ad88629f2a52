"""What the C library is asked for beside Python's own calls."""

from __future__ import annotations

import subprocess
import sys

import pytest

_FREED = """
import ctypes, threading
from pathlib import Path
from holdfast_service.storage import libc

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def use():
    for _ in range(20):
        buffers = [bytearray(b"x") * (4 << 20) for _ in range(2)] + [bytearray(b"x") * (64 << 10) for _ in range(8)]

libc.give_memory_back()
before = resident()
threads = [threading.Thread(target=use) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(resident() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_freed_memory_goes_back() -> None:
    """Megabytes that many threads had, each for a moment, do not stay with the process."""
    done = subprocess.run([sys.executable, "-c", _FREED], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 12 << 20
