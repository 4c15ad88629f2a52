"""memory_bounds: from /proc and control groups as other machines show them, in a directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast_formats import memory_bounds
from holdfast_formats.memory_bounds import Bound
from tests.limited_machine import GIB, Machine


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
    assert f"memory.high of {machine.groups}/pod/trainer" in [bound.name for bound in machine.bounds()]


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
    assert memory_bounds.of_process(machine.proc)[0] == Bound("RLIMIT_AS", 5 * GIB, 4 * GIB)


def test_nothing_to_read_leaves_what_the_system_says(tmp_path: Path) -> None:
    """Without /proc there is still a limit: the machine's memory."""
    bound = memory_bounds.of_machine(tmp_path / "nowhere")
    assert memory_bounds.of_process(tmp_path / "nowhere") == []
    assert 0 < bound.free <= bound.bytes_max
