"""The memory budget of the arena: limits of the machine and its control groups, and what is free.

Segments are memfds, which are charged like other memory. The size of /dev/shm limits only its own mount, so it is
ignored. A page is charged to the control group that touches it first, usually the trainer's. A daemon in its own
container sees its own limits and the machine's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from holdfast_formats.errors import LimitExceeded
from holdfast_formats.staging.arena import Geometry

PROC = Path("/proc")
SHARE_PERCENT = 94  # of the narrowest limit, for the arena, where no budget is declared; a run alone may have 96 % of that
SPARE_PERCENT = 5  # of a limit: never taken, so that those who live beside the arena are not killed for want of it
_UNLIMITED_BYTES = 2**62  # control groups of version 1 say "no limit" with a number beyond this


class Bound(NamedTuple):
    """A memory limit: its name, its total bytes, and how many are free now."""

    name: str
    bytes_max: int
    free: int


class SegmentRoom(NamedTuple):
    """How many bytes a new segment may have, and which limit applies."""

    bytes: int
    name: str


class Budget:
    """The arena's limit: as configured, or most of the narrowest limit found; never more than what is free."""

    def __init__(self, declared: int | None = None, find: Callable[[], list[Bound]] | None = None) -> None:
        """`LimitExceeded`, with the numbers, for a declaration beyond what there is."""
        self._find = find or find_bounds
        narrowest = min(self._find(), key=lambda bound: bound.bytes_max)
        if declared is not None and declared > narrowest.bytes_max:
            raise LimitExceeded(
                f"--arena-bytes-max is {declared}, but {narrowest.name} allows {narrowest.bytes_max} bytes in "
                f"all, of which {narrowest.free} are free now",
                hint=f"set at most {narrowest.bytes_max * SHARE_PERCENT // 100}, or leave it out to get that value",
            )
        self.name = "--arena-bytes-max" if declared is not None else f"{SHARE_PERCENT} % of {narrowest.name}"
        self.bytes_max = declared if declared is not None else narrowest.bytes_max * SHARE_PERCENT // 100

    def room(self, taken: int, touched: int) -> SegmentRoom:
        """How much more may be reserved, given the bytes reserved and touched so far."""
        promised = taken - touched  # not missing from what is free yet, and spoken for
        rooms = [SegmentRoom(self.bytes_max - taken, f"{self.name}, {self.bytes_max} bytes")]
        for bound in self._find():
            spare = bound.bytes_max * SPARE_PERCENT // 100
            rooms.append(SegmentRoom(bound.free - spare - promised, f"{bound.name}, {bound.bytes_max} bytes"))
        narrowest = min(rooms)
        return narrowest._replace(bytes=max(narrowest.bytes, 0))


def fitting(asked: Geometry, room: SegmentRoom) -> int:
    """How many of the requested slots fit; 0 if not even one does."""
    counts = range(asked.slots, 0, -1)
    return next((count for count in counts if asked._replace(slots=count).segment_bytes <= room.bytes), 0)


def find_bounds(proc: Path = PROC) -> list[Bound]:
    """All limits of this process's memory, the machine first. Unreadable ones are ignored."""
    machine = _machine(proc)
    groups = [bound for bound in (*_groups(proc), *_address_space(proc)) if bound.bytes_max < machine.bytes_max]
    return [machine, *groups]


def _machine(proc: Path) -> Bound:
    known = _numbers(proc / "meminfo")
    page = os.sysconf("SC_PAGE_SIZE")
    total = known.get("MemTotal:", os.sysconf("SC_PHYS_PAGES") * page // 1024) * 1024
    free = known.get("MemAvailable:", os.sysconf("SC_AVPHYS_PAGES") * page // 1024) * 1024
    return Bound("this machine's memory", total, free)


def _address_space(proc: Path) -> Iterator[Bound]:
    found = re.search(r"^Max address space +(\d+)", _text(proc / "self/limits"), re.MULTILINE)
    if found:
        limit = int(found[1])
        yield Bound("RLIMIT_AS", limit, limit - _numbers(proc / "self/status").get("VmSize:", 0) * 1024)


def _groups(proc: Path) -> Iterator[Bound]:
    """The limits of this process's control groups, of both versions, from its own group up to the outermost one seen."""
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
    """Which group a mount of the memory controller shows, and where it is."""
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
            yield Bound(f"{name} of {group}", int(limit), int(limit) - used + _cached(group, ""))


def _separate(group: Path) -> Iterator[Bound]:
    limit = _text(group / "memory.limit_in_bytes").strip()
    if limit.isdigit() and int(limit) < _UNLIMITED_BYTES:
        used = int(_text(group / "memory.usage_in_bytes") or 0)
        yield Bound(f"memory.limit_in_bytes of {group}", int(limit), int(limit) - used + _cached(group, "total_"))


def _cached(group: Path, prefix: str) -> int:
    """Pages of files that the kernel drops when memory is wanted. Shared memory is not among them."""
    known = _numbers(group / "memory.stat")
    return sum(known.get(f"{prefix}{name}", 0) for name in ("inactive_file", "active_file"))


def _numbers(path: Path) -> dict[str, int]:
    """The lines of a file that are a name and a number."""
    words = (line.split() for line in _text(path).splitlines())
    return {found[0]: int(found[1]) for found in words if len(found) > 1 and found[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
