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


_CHECKED = """
import resource, threading
import numpy as np
from holdfast_service.daemon.checking.statistics import BLOCK, measure
from holdfast_service.storage import libc

libc.give_memory_back()
numbers = np.linspace(-1, 1, 16 * BLOCK, dtype=np.float32)
numbers[::BLOCK] = np.nan  # so that finite numbers are copied out of every block
data = numbers.view(np.uint8)

def faults():
    measure("F32", data, data)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    measure("F32", data, data)
    print(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)

thread = threading.Thread(target=faults)
thread.start()
thread.join()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts page faults as Linux does")
def test_a_check_uses_its_memory_again() -> None:
    """Statistics of numbers that are not all finite need copies of a block: their pages fault once, not in every block."""
    done = subprocess.run([sys.executable, "-c", _CHECKED], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200  # 14 000 where each copy is mapped anew
