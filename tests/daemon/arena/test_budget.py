"""What memory the arena may have: from /proc and control groups as other machines show them, in a directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast_formats.errors import LimitExceeded
from holdfast_formats.staging import arena
from holdfast_service.daemon.arena.budget import Bound, Budget, SegmentRoom, find_bounds, fitting

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

    def found(self) -> list[tuple[int, int]]:
        return [(bound.bytes_max, bound.free) for bound in find_bounds(self.proc)]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_machine_without_groups_is_its_own_limit(machine: Machine) -> None:
    """Total and available memory count, and nothing else."""
    assert machine.found() == [(64 * GIB, 40 * GIB)]


def test_nested_groups_of_version_2_all_count(machine: Machine) -> None:
    """Each group from our own to the outermost limits us; pages of files count as free; "max" and the root limit nothing."""
    machine.member("0::/pod/trainer", "32 23 0:29 / {at} rw,nosuid shared:4 - cgroup2 cgroup rw")
    machine.unified("pod/trainer", "max", 3 * GIB, high=10 * GIB)
    machine.unified("pod", 20 * GIB, 12 * GIB)
    assert machine.found() == [(64 * GIB, 40 * GIB), (10 * GIB, 8 * GIB), (20 * GIB, 9 * GIB)]
    assert f"memory.high of {machine.groups}/pod/trainer" in [bound.name for bound in find_bounds(machine.proc)]


def test_nested_groups_of_version_1_all_count(machine: Machine) -> None:
    """The memory controller's own hierarchy is followed; its huge number for "no limit" is none."""
    machine.member("4:cpu,memory:/docker/a", "32 23 0:29 / {at} rw - cgroup cgroup rw,cpu,memory")
    machine.separate("docker/a", 8 * GIB, 6 * GIB)
    machine.separate("docker", 9223372036854771712, 6 * GIB)
    machine.separate("", 9223372036854771712, 30 * GIB)
    assert machine.found() == [(64 * GIB, 40 * GIB), (8 * GIB, 3 * GIB)]


@pytest.mark.parametrize("path", ["/docker/a", "/", "/../b"])
def test_a_container_sees_its_group_as_the_mounts_root(machine: Machine, path: str) -> None:
    """Whatever path the kernel tells, of the host or of another namespace, the mount shows our own group."""
    machine.member(f"0::{path}", "32 23 0:29 /docker/a {at} ro - cgroup2 cgroup rw")
    machine.unified("", 4 * GIB, 2 * GIB)
    assert machine.found() == [(64 * GIB, 40 * GIB), (4 * GIB, 3 * GIB)]


def test_the_address_space_limits_too(machine: Machine) -> None:
    """RLIMIT_AS counts less what is mapped already."""
    machine.put(machine.proc / "self/limits", f"Max address space         {5 * GIB}           unlimited            bytes\n")
    assert find_bounds(machine.proc)[1] == Bound("RLIMIT_AS", 5 * GIB, 4 * GIB)


def test_nothing_to_read_leaves_what_the_system_says(tmp_path: Path) -> None:
    """Without /proc there is still a limit: the machine's memory."""
    (bound,) = find_bounds(tmp_path / "nowhere")
    assert 0 < bound.free <= bound.bytes_max


def test_more_than_there_is_cannot_be_declared(machine: Machine) -> None:
    """The start is refused with what was declared, what limits it, and how much of that is free."""
    machine.member("0::/a", "32 23 0:29 / {at} rw - cgroup2 cgroup rw")
    machine.unified("a", 10 * GIB, 4 * GIB)
    find = lambda: find_bounds(machine.proc)  # noqa: E731
    with pytest.raises(
        LimitExceeded, match=rf"is {11 * GIB}, but memory.max of .*/a allows {10 * GIB} .* {7 * GIB} are free"
    ):
        Budget(11 * GIB, find)
    assert Budget(10 * GIB, find).bytes_max == 10 * GIB
    assert Budget(None, find).bytes_max == 10 * GIB * 94 // 100


def test_the_narrowest_limit_sets_the_room() -> None:
    """The budget less what is taken, or what is free less a spare part and less what was promised and not touched yet."""
    budget = Budget(50, lambda: [Bound("machine", 100, 60)])
    assert budget.room(0, 0) == SegmentRoom(50, "--arena-bytes-max, 50 bytes")
    assert budget.room(30, 30) == SegmentRoom(20, "--arena-bytes-max, 50 bytes")
    assert budget.room(40, 0).bytes == 10
    crowded = Budget(50, lambda: [Bound("machine", 100, 40), Bound("group", 80, 60)])
    assert crowded.room(10, 10) == SegmentRoom(35, "machine, 100 bytes")
    assert crowded.room(10, 0) == SegmentRoom(25, "machine, 100 bytes")
    assert crowded.room(50, 0).bytes == 0


def test_as_many_slots_as_fit() -> None:
    """From all down to none."""
    asked = arena.geometry(3, 40_960, 4096)
    for slots in (3, 2, 1):
        needed = asked._replace(slots=slots).segment_bytes
        assert fitting(asked, SegmentRoom(needed, "x")) == slots
        assert fitting(asked, SegmentRoom(needed - 1, "x")) == slots - 1
