"""What is done to files and disks."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

from benchmarks.disk import files

CUT_BYTES = 4096
POLL_S = 0.0005
GONE = ("", "Z")
STOPPED = "T"


def checkpoint_files(where: Path) -> list[Path]:
    """The files of a checkpoint, which is a file or a directory; the largest first."""
    found = [where] if where.is_file() else list(files(where))
    return sorted(found, key=lambda path: (-path.stat().st_size, str(path)))


def flip(path: Path, dice: random.Random) -> str:
    """Turn one bit round, in the middle four fifths of a file, and say where."""
    size = path.stat().st_size
    place, bit = dice.randrange(size // 10, size - size // 10), dice.randrange(8)
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))
    return f"{path.name}, byte {place}, bit {bit}"


def cut(path: Path) -> None:
    """Take the last 4 KiB of a file that has more."""
    os.truncate(path, path.stat().st_size - CUT_BYTES)


def free_bytes(at: Path) -> int:
    found = os.statvfs(at)
    return found.f_bavail * found.f_frsize


class Ballast:
    """A file that leaves so much of a disk free, and no more."""

    def __init__(self, path: Path, leaves_bytes: int) -> None:
        self._path, self._leaves = path, leaves_bytes
        self._size = 0
        self.grow()

    def grow(self) -> None:
        more = free_bytes(self._path.parent) - self._leaves
        if more > 0:
            with open(self._path, "ab") as file:
                os.posix_fallocate(file.fileno(), self._size, more)
            self._size += more

    def takes_what_is_given_back(self, pid: int) -> threading.Thread:
        """Watch: when a trainer empties the file that it overwrites, stop it, take that space, and let it go on."""
        before = free_bytes(self._path.parent)

        def watch() -> None:
            while free_bytes(self._path.parent) <= before:
                if _state(pid) in GONE:
                    return
                time.sleep(POLL_S)
            try:
                os.kill(pid, signal.SIGSTOP)
                while _state(pid) not in (*GONE, STOPPED):
                    time.sleep(POLL_S)
                self.grow()
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                return  # it had ended

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        return thread


def _state(pid: int) -> str:
    """As the kernel says it; "" where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
