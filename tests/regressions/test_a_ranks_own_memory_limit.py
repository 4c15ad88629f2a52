"""A trainer's container has a memory limit that the daemon does not see, and what it touches of its slots counts there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast_formats import naming
from tests.daemons import running
from tests.forked import Forked
from tests.memory_group import MemoryGroup, memory_group

MIB = 2**20
LIMIT_BYTES = 500 * MIB
# Two saves: the second one finds every slot touched. What is less than asked stands in the notices.
TRAINER = """
import os, sys, torch
from holdfast import Checkpointer
at, group, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
open(f"{group}/cgroup.procs", "w").write(str(os.getpid()))
weights = torch.arange(size // 8)
checkpointer = Checkpointer("r", {"model": {"w": weights}}, at=at, slots=8)
for step in (1, 2):
    checkpointer.save(step).result(timeout=240)
print("notices:", *checkpointer.notices)
checkpointer.close()
print("ended", flush=True)
os._exit(0)  # the end of the interpreter writes to pages that a forked program shares with the tests: they count then
"""
# The first save stays unwritten, because the other rank of its world saves nothing. Then the training takes all memory.
GROWING = """
import os, sys, torch
from holdfast import Checkpointer
from holdfast_formats.memory_bounds import can_touch
at, group, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
open(f"{group}/cgroup.procs", "w").write(str(os.getpid()))
os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "HOLDFAST_LAUNCH": "first"}
checkpointer = Checkpointer("r", {"model": {"w": torch.arange(size // 8)}}, at=at, policy="oldest-durable")
checkpointer.save(1, wait="staged")
taken = []
while can_touch(size):
    taken.append(b"x" * 2**22)
ticket = checkpointer.save(2)
print("notices:", *checkpointer.notices, ticket.dropped, ticket.error, flush=True)
del taken
print("then:", checkpointer.save(3, wait="staged").staged)
print("ended", flush=True)
os._exit(0)
"""


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    with memory_group(LIMIT_BYTES) as made:
        if made is None:
            pytest.skip("no control group with a memory limit can be made here")
        yield made


def train(at: object, group: MemoryGroup, state_bytes: int, program: str = TRAINER) -> str:
    """What the trainer says; the kernel has killed nothing for want of memory."""
    trainer = Forked(["-c", program, at, group.at, state_bytes])
    assert trainer.stdout is not None
    said = trainer.stdout.read()
    trainer.communicate()
    assert (group.oom_kills, trainer.returncode) == (0, 0), said
    return said


@pytest.mark.parametrize("door", ["socket", "http"])
def test_a_save_does_not_kill_the_trainer_in_its_container(tmp_path: Path, group: MemoryGroup, door: str) -> None:
    """Eight slots of the state do not fit the trainer's own control group, of which the daemon, outside of it, knows nothing
    but what the trainer says: it gets fewer slots, is told so with the limit's name, and lives.
    """
    with running(tmp_path / "root", listen="127.0.0.1:0" if door == "http" else "none") as daemon:
        said = train(daemon.url if door == "http" else daemon.socket, group, 100 * MIB)
    assert "instead of 8: memory has room for" in said and str(group.at) in said, said
    assert said.endswith("ended\n") and (tmp_path / "root" / naming.checkpoint_path("r", 2)).is_dir()


def test_a_state_that_does_not_fit_beside_itself_is_staged_on_disk(tmp_path: Path, group: MemoryGroup) -> None:
    """Not even one slot fits: staging goes to the disk of the root, as it does when the daemon's own limit is met."""
    with running(tmp_path / "root") as daemon:
        said = train(daemon.socket, group, 240 * MIB)
    assert "staging uses" in said and "rank 0's own limit" in said, said
    assert (tmp_path / "root" / naming.checkpoint_path("r", 2)).is_dir()


def test_memory_that_training_takes_from_a_second_slot_costs_a_save_and_not_the_trainer(
    tmp_path: Path, group: MemoryGroup
) -> None:
    """A second slot is reserved, and touched by the first save that overlaps: by then its memory may be gone. The policy
    decides as if there were no such slot, and the error says why. Once there is memory again, there is the slot.
    """
    with running(tmp_path / "root") as daemon:
        said = train(daemon.socket, group, 60 * MIB, GROWING)
    assert "notices: True" in said and "there is no memory for another slot of 60." in said, said
    assert said.endswith("then: True\nended\n"), said
