"""A control group of the kernel's with a memory limit, of either version, for processes of a test."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LIMITS = ("memory.max", "memory.limit_in_bytes")  # of version 2, and of version 1
REMOVE_S = 30.0


class MemoryGroup:
    """`prefix` are words of a command that joins the group and becomes the command behind them."""

    def __init__(self, at: Path) -> None:
        self.at = at
        self.prefix = ("sh", "-c", f'echo $$ > "{at}/cgroup.procs" && exec "$@"', "sh")

    @property
    def oom_kills(self) -> int:
        """How many of its processes the kernel has killed for want of memory."""
        said = "".join((self.at / name).read_text() for name in ("memory.events", "memory.oom_control") if self._has(name))
        found = re.search(r"^oom_kill (\d+)", said, re.MULTILINE)
        return int(found[1]) if found else 0

    def _has(self, name: str) -> bool:
        return (self.at / name).exists()


def _tops() -> Iterator[Path]:
    """Where the memory controller is mounted."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            yield Path(before.split(" ")[4])


@contextmanager
def memory_group(limit: int) -> Iterator[MemoryGroup | None]:
    """A new group with this limit for the length of the block; None where the kernel or our rights do not allow one."""
    for top in _tops():
        at = top / f"holdfast-test-{uuid.uuid4().hex[:8]}"
        try:
            at.mkdir()
        except OSError:
            continue
        try:
            name = next((name for name in LIMITS if (at / name).exists()), None)
            if name is None:
                continue
            (at / name).write_text(str(limit))
            yield MemoryGroup(at)
            return
        finally:
            _remove(at)
    yield None


def _remove(at: Path) -> None:
    """Its last process may still be on its way out."""
    limit = time.monotonic() + REMOVE_S
    while True:
        try:
            at.rmdir()
            return
        except OSError:
            if time.monotonic() > limit:
                raise
            time.sleep(0.05)
