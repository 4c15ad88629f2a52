"""A machine whose memory is limited, as /proc and the control groups show it, in a directory."""

from __future__ import annotations

from pathlib import Path

from holdfast_formats import memory_bounds
from holdfast_formats.memory_bounds import Bound

GIB = 2**30
GROUPS = "31 23 0:28 / {at}/pids rw - cgroup cgroup rw,pids\n"


class Machine:
    """A machine of 64 GiB, 40 of them free, whose /proc lies in a directory."""

    def __init__(self, at: Path) -> None:
        self.proc, self.groups = at / "proc", at / "sys fs"
        self.put(
            self.proc / "meminfo", f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {40 * 2**20} kB\nHuge: 0\n"
        )
        self.put(self.proc / "self/status", f"Name:\tx\nVmSize:\t{2**20} kB\n")
        self.put(self.proc / "self/limits", "Max address space         unlimited            unlimited            bytes\n")

    def put(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def member(self, line: str, mount: str) -> None:
        """This process's line in cgroup, and how the controller is mounted."""
        at = str(self.groups).replace(" ", "\\040")
        self.put(self.proc / "self/cgroup", f"9:pids:/x\n{line}\n")
        self.put(self.proc / "self/mountinfo", GROUPS.format(at=at) + mount.format(at=at) + "\n")

    def unified(self, group: str, limit: object, used: int, **more: object) -> None:
        """A group of version 2, with `used` bytes of which 1 GiB are pages of files."""
        directory = self.groups / group
        self.put(directory / "memory.max", f"{limit}\n")
        self.put(directory / "memory.current", f"{used}\n")
        self.put(directory / "memory.stat", f"anon 5\ninactive_file {GIB // 2}\nactive_file {GIB // 2}\nshmem 7\n")
        for name, value in more.items():
            self.put(directory / f"memory.{name}", f"{value}\n")

    def separate(self, group: str, limit: int, used: int) -> None:
        """A group of version 1, with `used` bytes of which 1 GiB are pages of files."""
        directory = self.groups / group
        self.put(directory / "memory.limit_in_bytes", f"{limit}\n")
        self.put(directory / "memory.usage_in_bytes", f"{used}\n")
        self.put(directory / "memory.stat", f"inactive_file 9\ntotal_inactive_file {GIB}\ntotal_active_file 0\n")

    def bounds(self) -> list[Bound]:
        return [memory_bounds.of_machine(self.proc), *memory_bounds.of_process(self.proc)]

    def found(self) -> list[tuple[int, int]]:
        return [(bound.bytes_max, bound.free) for bound in self.bounds()]
