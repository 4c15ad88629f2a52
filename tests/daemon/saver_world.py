"""A saver with real control over a memory tier, and ranks that talk to it without a socket."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from holdfast_formats import naming
from holdfast_formats.digest import digest
from holdfast_formats.errors import CheckpointError
from holdfast_formats.lineage import NO_INTENT, Intent
from holdfast_formats.region import Box
from holdfast_formats.staging import arena, slot_table
from holdfast_formats.staging.arena import SlotHeader, SlotState
from holdfast_formats.staging.messages import Policy, SlotRequest
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_formats.staging.wire import Outcome
from holdfast_formats.tensors import StagedFragment, TensorSpec
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.control import Control
from holdfast_service.daemon.arena.arena import Arena
from holdfast_service.daemon.arena.budget import Budget
from holdfast_service.daemon.arena.segment import ArenaSegment
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.daemon.saving.rounds import Participant
from holdfast_service.daemon.saving.saver import Saver
from holdfast_service.storage import MemoryTier, RootStorage, Tier, stored_in
from tests.daemons import wait_until
from tests.databases import sqlite_url
from tests.in_memory import memory

SIZE = 64
RUN = "r"


def content(step: int, rank: int) -> np.ndarray:
    """What a rank holds at a step."""
    return np.full(SIZE, (step * 7 + rank) % 251, np.uint8)


class Gate:
    """While it is shut, storage takes no file; `at` is the path of the one that waits before it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.shut = False
        self.at = ""

    def swing(self, shut: bool) -> None:
        with self._changed:
            self.shut = shut
            self._changed.notify_all()

    def wait_for(self, step: int) -> None:
        """Return when a file of this step waits before the gate."""
        directory = naming.step_directory(step)
        with self._changed:
            assert self._changed.wait_for(lambda: directory in self.at, 30), f"step {step} is not being written: {self.at}"

    def enter(self, path: str) -> None:
        with self._changed:
            self.at = path
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: not self.shut, 60), "the gate was never opened"
            self.at = ""


class GatedTier:
    """A tier, files of which are made only while its gate is open."""

    def __init__(self, tier: Tier) -> None:
        self._tier, self.gate = tier, Gate()

    def __getattr__(self, name: str) -> Any:
        act = getattr(self._tier, name)
        if name != "create":
            return act

        def create(path: str, size: int) -> Any:
            self.gate.enter(path)
            return act(path, size)

        return create


class Rank:
    """One rank of an attempt: leases, fills and seals, and collects the outcomes it is told."""

    def __init__(
        self, world: SaverWorld, rank: int, attempt: int, launch_world: int, slots: int = 2, data_bytes: int = SIZE
    ) -> None:
        self.world, self.rank, self.attempt, self.size = world, rank, attempt, launch_world
        self.outcomes: dict[int, Outcome] = {}
        self._heard = threading.Condition()
        self.who = Participant(RUN, rank, launch_world, attempt, self._notify)
        self.segment: ArenaSegment = world.arena.reserve(
            arena.geometry(slots, data_bytes, 4096), f"rank{rank}", self.who.owner
        )
        world.saver.join(self.who)

    def _notify(self, outcome: Outcome) -> None:
        with self._heard:
            self.outcomes[outcome.step] = outcome
            self._heard.notify_all()

    def wait(self, step: int) -> Outcome:
        """The outcome of a step."""
        with self._heard:
            assert self._heard.wait_for(lambda: step in self.outcomes, 30), f"no outcome for step {step}"
            return self.outcomes[step]

    def lease(self, step: int, policy: Policy = "wait", intent: Intent = NO_INTENT) -> int:
        wanted = SlotRequest(step=step, policy=policy, **intent._asdict())
        return self.world.saver.lease(self.who, self.segment, wanted, 0)

    def fill_and_seal(self, step: int, slot: int, intent: Intent = NO_INTENT) -> None:
        """Write this rank's rows, the table and the seal, and hand the slot over."""
        spec = TensorSpec("model", "w", "U8", (self.size, SIZE))
        held = (StagedFragment(spec, (Box((self.rank, 0), (1, SIZE)),), 0),)
        self.seal(step, slot, held, content(step, self.rank).data, intent)

    def seal(
        self, step: int, slot: int, held: Sequence[StagedFragment], data: memoryview, intent: Intent = NO_INTENT
    ) -> None:
        """Write the data, the table of these fragments and the seal, and hand the slot over."""
        memory, geometry, size = self.segment.memory, self.segment.geometry, len(data)
        start = geometry.data_offset(slot)
        memory[start : start + size] = data
        held = tuple(held)
        made = SlotTable(
            RUN, step, self.attempt, self.rank, self.size, tuple(dict.fromkeys(one.spec.group for one in held)), held, {}, {}
        )
        said = {"restored": intent.restored, "turn": intent.turn, "existing": intent.existing, "again": intent.again}
        encoded = slot_table.encode(msgspec.structs.replace(made, **said))
        at = geometry.table_offset(slot)
        memory[at : at + len(encoded)] = encoded
        header = SlotHeader(SlotState.LEASED, step, self.attempt, size, len(encoded), 0)
        arena.seal(memory, geometry, slot, header, digest(encoded))
        self.world.saver.seal(self.who, slot, step, digest(encoded), intent.turn)

    def save(self, step: int, policy: Policy = "wait", intent: Intent = NO_INTENT) -> None:
        self.fill_and_seal(step, self.lease(step, policy, intent), intent)

    def free_slots(self) -> int:
        return sum(self.segment.state(slot) is SlotState.FREE for slot in range(self.segment.geometry.slots))

    def leave(self) -> None:
        """The rank's process ends."""
        self.world.saver.gone(self.who)
        self.world.arena.drop(self.segment)


class SaverWorld:
    """The daemon's parts but for its socket."""

    def __init__(self, tier: Tier, keep_last: int | None = None, storage: RootStorage | None = None) -> None:
        """`storage`: another root than the `tier`, such as a bucket."""
        self.tier = tier
        self._directory = tempfile.TemporaryDirectory(dir=memory())
        self.catalog = Catalog.open(sqlite_url(f"{self._directory.name}/catalog.sqlite"), "node")
        self.control = Control(storage or stored_in(tier), self.catalog, keep_last)
        self.saver = Saver(self.control.records, self.control, "node")
        self.arena = Arena(Budget(2**30), make_room=self.saver.holds.make_room)
        self._launches = 0

    def launch(self, world: int, slots: int = 2, data_bytes: int = SIZE) -> list[Rank]:
        """The ranks of a new attempt."""
        self._launches += 1
        attempt = self.control.launches.declare(RUN, f"launch-{self._launches}", world, None)
        return [Rank(self, rank, attempt, world, slots, data_bytes) for rank in range(world)]

    def saved(self, step: int) -> Rank:
        """The only rank of a new launch, which has saved this step: it is committed."""
        (rank,) = self.launch(1)
        rank.save(step)
        assert rank.wait(step).state == "committed"
        return rank

    def held(self, step: int) -> dict[int, tuple[int, bytes]]:
        """By rank: the slot in which its part of a held step stands, and the bytes there; nothing when it is not held."""
        parts, fds = self.saver.holds.lend(RUN, step)
        found = {}
        for part, fd in zip(parts, fds, strict=True):
            with mmap.mmap(fd, os.fstat(fd).st_size) as memory, memoryview(memory) as seen:
                made = arena.read_superblock(seen)
                start = made.data_offset(part.slot)
                found[part.rank] = part.slot, bytes(seen[start : start + SIZE])
            os.close(fd)
        return found

    def committed(self) -> list[int]:
        """The steps whose directories are sound, each verified byte by byte; fails on one that is visible but not sound."""
        steps = []
        for name in self.tier.list(f"{RUN}/{naming.CHECKPOINTS}"):
            step = naming.parse_step_directory(name)
            assert step is not None, name
            made = verify(self.tier, naming.checkpoint_path(RUN, step))
            entry = made.tensors["model"]["w"]
            stored = self.tier.read(f"{naming.checkpoint_path(RUN, step)}/{entry.file}", entry.start, entry.nbytes)
            assert stored == b"".join(content(step, rank).tobytes() for rank in range(made.world))
            steps.append(step)
        return sorted(steps)

    def checked(self) -> None:
        """Wait until what is committed was read back, and all that follows from that was set going."""
        wait_until(lambda: self.saver.checks.pending == 0)

    def close(self) -> None:
        self.saver.close()
        self.control.close()
        self.catalog.close()
        self._directory.cleanup()


@contextmanager
def saver_world(
    tier: Tier | None = None, keep_last: int | None = None, storage: RootStorage | None = None
) -> Iterator[SaverWorld]:
    """A saver for the length of a block."""
    world = SaverWorld(tier or MemoryTier(), keep_last, storage)
    try:
        yield world
    finally:
        world.close()


def refused(act: object, *arguments: object) -> CheckpointError | None:
    """The named error of a call, or None when it went through."""
    try:
        act(*arguments)  # type: ignore[operator]
    except CheckpointError as error:
        return error
    return None
