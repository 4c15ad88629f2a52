"""Segments within a budget: fewer slots, the disk instead, or a refusal; and what becomes of outgrown ones."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import socket
import threading
from pathlib import Path

import pytest

from holdfast_formats.errors import InvalidRequest, LimitExceeded
from holdfast_formats.memory_bounds import Bound
from holdfast_formats.staging import arena
from holdfast_formats.staging.arena import SegmentOwner
from holdfast_service.daemon.arena import arena as arena_module
from holdfast_service.daemon.arena import segment as segments
from holdfast_service.daemon.arena.arena import Arena
from holdfast_service.daemon.arena.budget import Budget
from holdfast_service.daemon.arena.peer import PeerProcess
from holdfast_service.daemon.arena.segment import ArenaSegment
from holdfast_service.daemon.arena.shares import ShareHolder, Shares
from holdfast_service.daemon.arena.spill import Spill
from tests.forked import Forked

ASKED = arena.geometry(2, 2**20, 4096)
ONE = ASKED._replace(slots=1)
OWNER = SegmentOwner("r", 0, 1, 1)


def memory_of(size: int) -> Budget:
    return Budget(size, lambda: [Bound("machine", 2**40, 2**40)])


def test_all_slots_where_they_fit() -> None:
    """No notice, and the memory is counted."""
    node = Arena(memory_of(ASKED.segment_bytes))
    segment = node.reserve(ASKED, "r")
    assert segment.geometry == ASKED and segment.notice == "" and node.bytes == ASKED.segment_bytes
    node.drop(segment)
    assert node.bytes == 0


def test_ranks_of_one_control_group_share_its_room() -> None:
    """Two ranks that reserve at the same moment, before either has touched its slots, do not both get what is free once;
    what the first gives back counts for the next at once, and ranks of another group have their own.
    """
    node, one = Arena(memory_of(2**30)), ONE.segment_bytes

    def holder(group: str, free: int) -> ShareHolder:
        bounds = [Bound("memory.max", 0, free, group), Bound("memory.high", 2**40, 2**40, group)]
        return ShareHolder("r", limits=node.limits(bounds, "rank 7's"))

    first = node.reserve(ASKED, "r", holder=holder("2:1", ASKED.segment_bytes))
    assert first.geometry.slots == 2
    with pytest.raises(LimitExceeded, match=r"and 0 are left of rank 7's own limit, memory.max, 0 bytes") as refused:
        node.reserve(ONE, "r", holder=holder("2:1", ASKED.segment_bytes - 4 * arena.PAGE_BYTES))
    assert "raise the memory limit of the trainer's container" in (refused.value.hint or "")
    assert node.reserve(ASKED, "r", holder=holder("2:2", one)).geometry.slots == 1
    first.memory[:] = bytes(len(first.memory))  # touched: less is free, and that much of it is the first one's
    second = holder("2:1", 0)
    node.drop(first)
    assert node.reserve(ASKED, "r", holder=second).geometry.slots == 2


def test_memory_goes_with_the_segment_and_waits_for_no_collector() -> None:
    """Nothing refers to a dropped segment, not even itself: its mapping, which holds the memory, ends there and then."""

    class Conversation:
        segment: ArenaSegment | None = None

    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:holdfast-circle")

    gc.collect()
    gc.disable()
    try:
        node, user = Arena(memory_of(ASKED.segment_bytes)), Conversation()
        user.segment = node.reserve(ASKED, "circle")
        here, there = socket.socketpair()
        with here, there:
            user.segment.used_by(user, PeerProcess(here))
        assert mappings()
        node.drop(user.segment)
        user.segment = None
        assert not mappings()
    finally:
        gc.enable()


def test_fewer_slots_where_all_do_not_fit() -> None:
    """As many as there is room for, and a notice with what limits them and how much more would be needed."""
    node = Arena(memory_of(ASKED.segment_bytes - 1))
    segment = node.reserve(ASKED, "r")
    assert segment.geometry == ONE and not segment.spilled
    assert "1 slot instead of 2" in segment.notice and "--arena-bytes-max" in segment.notice
    node.drop(segment)


def test_a_refusal_has_the_numbers() -> None:
    """What one slot needs, what all need, what is taken, what is left, and of which limit."""
    node = Arena(memory_of(ONE.segment_bytes + 100))
    held = node.reserve(ONE, "held")
    numbers = (
        f"needs {ONE.segment_bytes} .*, {ASKED.segment_bytes} for 2; {ONE.segment_bytes} are reserved, and 100 are left"
    )
    with pytest.raises(LimitExceeded, match=numbers) as refused:
        node.reserve(ASKED, "r")
    assert refused.value.members == {"needed": ONE.segment_bytes, "taken": ONE.segment_bytes, "left": 100}
    node.drop(held)
    node.drop(node.reserve(ONE, "r"))


def test_memory_promised_to_others_is_not_promised_twice() -> None:
    """What another segment has not touched yet is spoken for, though the machine still says that it is free."""
    free = ASKED.segment_bytes + ONE.segment_bytes + 4096
    node = Arena(Budget(None, lambda: [Bound("machine", 2 * free, free + 2 * free * 5 // 100)]))
    first, second = node.reserve(ASKED, "first"), node.reserve(ASKED, "second")
    assert first.geometry.slots == 2 and second.geometry.slots == 1 and "(machine," in second.notice
    node.drop(first)
    node.drop(second)


class TestSpill:
    """Where memory has no room for one slot, the storage's disk has."""

    def test_one_slot_on_the_disk(self, tmp_path: Path) -> None:
        """It takes no memory of the budget, leaves no name, works as memory does, and says what it costs."""
        node = Arena(memory_of(ONE.segment_bytes - 1), None, Spill(tmp_path))
        segment = node.reserve(ASKED, "r")
        assert segment.spilled and segment.geometry == ONE and node.bytes == 0 and list(tmp_path.iterdir()) == []
        for word in (str(tmp_path), "MiB/s", "stall training", "twice", "more memory"):
            assert word in segment.notice
        slot = segment.lease(5, 1, 0)
        at = ONE.data_offset(slot)
        segment.memory[at : at + 5] = b"hello"
        assert os.pread(segment.fd, 5, at) == b"hello"
        segment.release(slot)
        assert segment.lease(6, 1, 0) == slot
        assert os.pread(segment.fd, 5, at) == bytes(5)  # so that the next save need not read it in
        node.drop(segment)

    def test_memory_that_may_not_be_shared_is_no_want_of_memory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where seccomp forbids memfd_create, the disk is taken; without it, the refusal names what is forbidden."""

        def forbidden(name: str, flags: int) -> int:
            raise PermissionError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "memfd_create", forbidden)
        node = Arena(memory_of(2**30), None, Spill(tmp_path))
        segment = node.reserve(ASKED, "r")
        assert segment.spilled and node.bytes == 0
        assert "memfd_create: Operation not permitted" in segment.notice and "seccomp" in segment.notice
        assert "more memory would" not in segment.notice
        node.drop(segment)
        with pytest.raises(LimitExceeded, match="memfd_create: Operation not permitted") as refused:
            Arena(memory_of(2**30)).reserve(ASKED, "r")
        assert "seccomp" in refused.value.hint and "free memory" not in refused.value.hint

    def test_a_limit_on_the_size_of_files_is_one_of_slots(self, tmp_path: Path) -> None:
        """`ulimit -f` counts for shared memory: fewer slots, or a refusal that names it, whatever memory there is."""
        program = (
            "import resource, sys; from pathlib import Path\n"
            "from holdfast_formats.errors import StorageFailed; from tests.daemon.arena.test_arena import *\n"
            "node = Arena(memory_of(2**30), None, Spill(Path(sys.argv[1])))\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (ONE.segment_bytes, ONE.segment_bytes))\n"
            "print(node.reserve(ASKED, 'r').notice)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
            "try: node.reserve(ASKED, 's')\n"
            "except LimitExceeded as error: print(error)\n"
            "try: segments.memfd('m', 8192)\n"
            "except StorageFailed as error: print(error)\n"
        )
        made = Forked(["-c", program, str(tmp_path)])
        assert made.stdout is not None
        with made.stdout as said:
            fewer, refused, hint, mirror, again = said.read().splitlines()
        assert fewer.startswith("reserved 1 slot instead of 2") and "RLIMIT_FSIZE" in fewer
        assert "RLIMIT_FSIZE, 4096 bytes; it cannot be staged on disk either" in refused and "File too large" in refused
        assert "ulimit -f" in hint and "ulimit -f" in again and "free memory" not in hint + again
        assert "may not create a file, or shared memory, of 8192 bytes" in mirror
        assert made.wait(180) == 0

    def test_a_full_disk_is_refused_with_both_numbers(self, tmp_path: Path) -> None:
        """Neither memory nor disk: the refusal says what was missing in each."""
        node = Arena(memory_of(4096), None, Spill(tmp_path))
        huge = arena.geometry(1, 2**45, 4096)
        with pytest.raises(LimitExceeded, match=rf"needs {huge.segment_bytes} .* 4096 are left of .* staging needs"):
            node.reserve(huge, "r")
        assert node.bytes == 0

    def test_it_is_adopted(self, tmp_path: Path) -> None:
        """The next daemon goes on with it, and knows that it takes no memory."""
        before = Arena(memory_of(0), None, Spill(tmp_path))
        segment = before.reserve(ASKED, "r", OWNER)
        slot = segment.lease(5, 1, 0)
        node = Arena(memory_of(0))
        found, taken = node.attach(segment.fd, OWNER)
        assert taken == [slot] and found.spilled and node.bytes == 0
        with pytest.raises(segments.ArenaFull):
            found.lease(6, 1, 0)  # what was leased stays so
        found.release(slot)
        node.drop(found)
        segment.release(slot)
        before.drop(segment)

    def test_a_file_that_may_want_for_blocks_is_not_adopted(self, tmp_path: Path) -> None:
        """A write into mapped memory must not fail: a file with holes, or that others find by name, is refused."""
        before = Arena(memory_of(0), None, Spill(tmp_path))
        segment = before.reserve(ASKED, "r", OWNER)
        with open(tmp_path / "copy", "w+b") as copy:
            copy.write(bytes(segment.memory[:4096]))
            copy.truncate(ONE.segment_bytes)
            for gone in (False, True):
                if gone:
                    os.unlink(tmp_path / "copy")
                with pytest.raises(InvalidRequest, match="not a staging arena"):
                    Arena(memory_of(0)).attach(copy.fileno(), OWNER)
        before.drop(segment)


class TestOutgrown:
    """A rank whose state has grown gets a larger segment; the old one goes when what it holds is saved."""

    LARGER = arena.geometry(2, 3 * 2**19, 4096)

    def outgrown(self, node: Arena) -> tuple[ArenaSegment, int]:
        """A segment with a slot in use, that its rank does not want any more."""
        segment = node.reserve(ASKED, "r", OWNER)
        slot = segment.lease(5, 1, 0)
        node.drop(segment, outgrown=True)
        return segment, slot

    @pytest.mark.parametrize("attempt", [1, 2], ids=["same-launch", "next-launch"])
    def test_it_is_waited_for_where_both_do_not_fit(self, attempt: int) -> None:
        """The new one has all its slots as soon as the old one's save has ended; so has that of the rank's next launch."""
        node = Arena(memory_of(self.LARGER.segment_bytes))
        old, slot = self.outgrown(node)
        made: list[ArenaSegment] = []
        owner = OWNER._replace(attempt=attempt)
        asking = threading.Thread(target=lambda: made.append(node.reserve(self.LARGER, "r", owner)))
        asking.start()
        asking.join(0.2)
        assert not made and node.bytes == ASKED.segment_bytes
        old.release(slot)
        asking.join(180)
        assert made[0].geometry == self.LARGER and node.bytes == self.LARGER.segment_bytes
        node.drop(made[0])

    def test_it_is_not_waited_for_where_both_fit(self) -> None:
        """Both exist until the old one's save has ended."""
        node = Arena(memory_of(2 * self.LARGER.segment_bytes))
        old, slot = self.outgrown(node)
        new = node.reserve(self.LARGER, "r", OWNER)
        assert node.bytes == ASKED.segment_bytes + self.LARGER.segment_bytes
        old.release(slot)
        assert node.bytes == self.LARGER.segment_bytes
        node.drop(new)

    def test_others_are_not_waited_for(self) -> None:
        """Where it is somebody else's memory that is missing, the answer comes at once."""
        node = Arena(memory_of(ASKED.segment_bytes + self.LARGER.segment_bytes - 1))
        old, slot = self.outgrown(node)
        new = node.reserve(self.LARGER, "other", OWNER._replace(rank=1, world=2))
        assert new.geometry.slots == 1
        old.release(slot)
        node.drop(new)

    def test_a_save_that_does_not_end_costs_slots_in_the_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The wait has an end: then there are fewer slots, never more bytes than the budget has."""
        monkeypatch.setattr(arena_module, "RETURN_WAIT_S", 0.05)
        node = Arena(memory_of(ASKED.segment_bytes + self.LARGER.segment_bytes - 1))
        old, slot = self.outgrown(node)
        new = node.reserve(self.LARGER, "r", OWNER)
        assert new.geometry.slots == 1 and "1 slot instead of 2" in new.notice
        old.release(slot)
        node.drop(new)

    def test_its_memory_is_free_though_others_map_it(self) -> None:
        """The rank's mapping does not keep the pages; superblock and headers stay readable."""
        node = Arena(memory_of(ASKED.segment_bytes))
        old, slot = self.outgrown(node)
        ranks = os.dup(old.fd)
        for each in range(ASKED.slots):
            at = ASKED.data_offset(each)
            old.memory[at : at + ASKED.data_bytes] = b"x" * ASKED.data_bytes
        assert os.fstat(ranks).st_blocks * 512 > 2**20
        old.release(slot)
        assert os.fstat(ranks).st_blocks * 512 <= 4 * 4096
        assert arena.read_measures(memoryview(os.pread(ranks, 4096, 0))) == ASKED
        os.close(ranks)


class TestTenants:
    """Ranks of other users: what they hold of the daemon's memory must not be able to end the daemon."""

    def test_a_tenant_gets_no_file(self, tmp_path: Path) -> None:
        """A file can be truncated by whoever has it, which ends who has mapped it. The refusal says who is staged."""
        node = Arena(memory_of(ONE.segment_bytes - 1), None, Spill(tmp_path))
        with pytest.raises(LimitExceeded, match=r"not staged on disk.*truncate it.*over HTTP"):
            node.reserve(ASKED, "r", OWNER, ShareHolder("r", "user 7"), on_disk=False)
        assert node.reserve(ASKED, "r", OWNER).spilled

    def test_a_tenant_brings_no_file(self, tmp_path: Path) -> None:
        """Nor one that it has made by itself, or that it got from a daemon before."""
        before = Arena(memory_of(0), None, Spill(tmp_path))
        segment = before.reserve(ASKED, "r", OWNER)
        with pytest.raises(InvalidRequest, match="a file of another user"):
            Arena(memory_of(0)).attach(segment.fd, OWNER, "user 7")
        found, _ = Arena(memory_of(0)).attach(segment.fd, OWNER)
        assert found.spilled

    def test_what_a_tenant_brings_counts_for_its_share(self) -> None:
        """Memory that takes no page yet could else take everybody's budget without a byte."""
        before = Arena(memory_of(2**30))
        mine = before.reserve(ASKED, "r", OWNER)
        node = Arena(memory_of(ASKED.segment_bytes), shares=Shares(96))
        with pytest.raises(LimitExceeded, match="all runs of user 7 may reserve 96 %"):
            node.attach(mine.fd, OWNER, "user 7")
        assert node.bytes == 0
        found, _ = node.attach(mine.fd, OWNER)
        assert found.holder == ShareHolder("r")
        roomy = Arena(memory_of(2 * ASKED.segment_bytes), shares=Shares(96))
        found, _ = roomy.attach(mine.fd, OWNER, "user 7")
        assert found.holder == ShareHolder("r", "user 7")

    def test_memory_in_large_pages_is_refused(self) -> None:
        """Where none is left, a touch of a page ends who touches it, whatever the seals say."""
        try:
            fd = os.memfd_create("large", os.MFD_ALLOW_SEALING | 0x0004)  # MFD_HUGETLB
        except OSError as error:
            pytest.skip(f"no large pages here: {error}")
        with open(fd, "w+b"):
            os.ftruncate(fd, 2 * 2**20)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            with pytest.raises(InvalidRequest, match="not a staging arena"):
                segments.is_spilled(fd)
