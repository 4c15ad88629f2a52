"""Limits and free memory of a process: the machine, its control groups, and RLIMIT_AS.

A daemon and its ranks may be in different control groups. A page of shared memory is charged to the group of the process
that touches it first, which for a slot is the rank's. So each side finds its own limits, with these functions, and a rank
sends them to the daemon.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

PROC = Path("/proc")
SPARE_PERCENT = 5  # of a limit: never taken, so that other memory of the process fits beside the slots
BOUNDS_MAX = 16  # in one message to the daemon
_BYTES_MAX = 2**62  # control groups of version 1 say "no limit" with a number beyond this
_Bytes = Annotated[int, Field(ge=-_BYTES_MAX, le=_BYTES_MAX)]


class Bound(NamedTuple):
    """A memory limit: its name, its total bytes, its free bytes, and its control group, "" for none.

    Processes in different containers give one group the same `group`, if they are on one machine.
    """

    name: Annotated[str, Field(max_length=1024)]
    bytes_max: _Bytes
    free: _Bytes
    group: Annotated[str, Field(max_length=64)] = ""

    @property
    def usable(self) -> int:
        """Free bytes minus a reserve; may be negative."""
        return self.free - self.bytes_max * SPARE_PERCENT // 100


def of_machine(proc: Path = PROC) -> Bound:
    """The machine's memory."""
    known = _numbers(proc / "meminfo")
    page = os.sysconf("SC_PAGE_SIZE")
    total = known.get("MemTotal:", os.sysconf("SC_PHYS_PAGES") * page // 1024) * 1024
    free = known.get("MemAvailable:", os.sysconf("SC_AVPHYS_PAGES") * page // 1024) * 1024
    return Bound("this machine's memory", total, free)


def of_process(proc: Path = PROC) -> list[Bound]:
    """The limits of this process that are narrower than the machine: its control groups, of both versions, from its own
    up to the outermost one seen, and its address space. Unreadable ones are ignored.
    """
    machine = of_machine(proc)
    bounds = [bound for bound in (*_groups(proc), *_address_space(proc)) if bound.bytes_max < machine.bytes_max]
    return bounds[:BOUNDS_MAX]


def can_touch(size: int, proc: Path = PROC) -> bool:
    """Whether the machine and this process's control groups have so much memory left, for what is mapped already."""
    return all(bound.usable >= size for bound in (of_machine(proc), *_groups(proc)))


def _address_space(proc: Path) -> Iterator[Bound]:
    match = re.search(r"^Max address space +(\d+)", _text(proc / "self/limits"), re.MULTILINE)
    if match:
        limit = int(match[1])
        yield Bound("RLIMIT_AS", limit, limit - _numbers(proc / "self/status").get("VmSize:", 0) * 1024)


def _groups(proc: Path) -> Iterator[Bound]:
    for line in _text(proc / "self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        unified = number == "0" and not controllers
        if not unified and "memory" not in controllers.split(","):
            continue
        mounted = _mounted(proc, unified)
        if mounted is None:
            continue
        root, at = mounted
        # A path outside the mount's root is one of another namespace: then the mount shows our own group.
        below = os.path.relpath(path, root) if path == root or path.startswith(root.rstrip("/") + "/") else "."
        group = (at / below) if ".." not in below else at
        while True:
            yield from _unified(group) if unified else _separate(group)
            if group == at:
                break
            group = group.parent


def _mounted(proc: Path, unified: bool) -> tuple[str, Path] | None:
    """The group in a mount of the memory controller, and its path."""
    for line in _text(proc / "self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind == ("cgroup2" if unified else "cgroup") and (unified or "memory" in options.split(",")):
            root, at = before.split(" ")[3:5]
            return root, Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), at))
    return None


def _unified(group: Path) -> Iterator[Bound]:
    for name in ("memory.max", "memory.high"):  # beyond the second a group is slowed down until it is of no use
        limit = _text(group / name).strip()
        if limit.isdigit():
            used = int(_text(group / "memory.current") or 0)
            free = int(limit) - used + _cached(group, "")
            yield Bound(f"{name} of {group}", min(int(limit), _BYTES_MAX), free, _number(group, 2))


def _separate(group: Path) -> Iterator[Bound]:
    limit = _text(group / "memory.limit_in_bytes").strip()
    if limit.isdigit() and int(limit) < _BYTES_MAX:
        used = int(_text(group / "memory.usage_in_bytes") or 0)
        free = int(limit) - used + _cached(group, "total_")
        yield Bound(f"memory.limit_in_bytes of {group}", int(limit), free, _number(group, 1))


def _number(group: Path, version: int) -> str:
    """Identifies a group in every container: the kernel's number of its directory."""
    try:
        return f"{version}:{group.stat().st_ino}"
    except OSError:
        return ""


def _cached(group: Path, prefix: str) -> int:
    """Pages of files that the kernel drops when memory is wanted. Shared memory is not among them."""
    known = _numbers(group / "memory.stat")
    return sum(known.get(f"{prefix}{name}", 0) for name in ("inactive_file", "active_file"))


def _numbers(path: Path) -> dict[str, int]:
    words = (line.split() for line in _text(path).splitlines())
    return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
