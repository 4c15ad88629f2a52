"""All removers of a root in which anything may be damaged or gone: what could be restored before can be restored after."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast_formats import lineage, naming
from holdfast_formats.disk import manifests
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import CheckpointError, Conflict, NoSuchCheckpoint, NoSuchResource, NoSuchRun, StorageFailed
from holdfast_formats.lineage import Rewind
from holdfast_formats.naming import Place
from holdfast_formats.rest import bodies
from holdfast_formats.rest.retention import Best, RetentionPolicy
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.checkpoints import commit, roots
from holdfast_service.control.control import Control
from holdfast_service.control.retention import replaced_checkpoints
from holdfast_service.control.retention.policy import Candidate
from holdfast_service.daemon.checking.verifier import examine
from holdfast_service.daemon.copying.replicas import Replicator
from holdfast_service.storage import MemoryTier, PosixStore, Tier, stored_in
from tests.control.published import a_manifest, put_checkpoint
from tests.databases import sqlite_url
from tests.in_memory import memory

RUNS = ("run", "renamed")
DAY_S = 86_400.0
GROUPS = (("model",), ("model", "optim"))
FILES = (naming.COMMIT, naming.MANIFEST, naming.STATE)
CLOCKS = ("1970-01-01T00:00:00.000Z", "2026-11-28T01:00:00.000Z", "2026-11-28T03:00:00.000Z", "9999-01-01T00:00:00.000Z")
HOWS = st.sampled_from(["gone", "flipped", "cut"])
OFTEN = st.sampled_from([True, True, True, False])
AGES = st.integers(0, 3)  # how many there are that are newer
POLICIES = st.builds(
    RetentionPolicy,
    last=st.none() | st.integers(1, 3),
    every_steps=st.none() | st.integers(1, 5),
    steps_apart=st.none() | st.integers(1, 5),
    every_seconds=st.none() | st.integers(1, 100),
    within_seconds=st.none() | st.integers(1, 100),
    best=st.sampled_from([(), (Best(metric="loss", count=1),)]),
    keep_full=st.none() | st.integers(1, 2),
)


class Killed(BaseException):
    """The process is killed here: nothing is caught, and nothing goes on."""


class MortalTier:
    """The storage as one process has it: after so many changes it is killed, and changes nothing any more."""

    def __init__(self, tier: MemoryTier) -> None:
        self._tier, self.left = tier, float("inf")

    def __getattr__(self, name: str) -> Any:
        act = getattr(self._tier, name)
        if name not in _CHANGES:
            return act

        def change(*arguments: Any) -> Any:
            if self.left <= 0:
                raise Killed if threading.current_thread() is threading.main_thread() else StorageFailed("it was killed")
            self.left -= 1
            return act(*arguments)

        return change


_CHANGES = ("put", "replace", "publish", "exchange", "link", "remove_file", "remove_tree", "sync_directory", "supplant")
Restorable = dict[tuple[str, ...], int | None]  # the newest step that could be restored with each set of groups


class Removers(RuleBasedStateMachine):
    """Saves with any clock, also in the place of others, time that passes, damage of any file, policies, deaths of the
    daemon, and everything that removes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory(dir=memory())
        self.tier, self.far, self.time, self.clock = MemoryTier(), MemoryTier(), 0.0, 1.7e9
        self.patched = patch.object(replaced_checkpoints, "MEND_S", 0.0)
        self.patched.start()
        self.run, self.next, self.launches, self.ticks = RUNS[0], 0, 0, 0
        self.asked: set[int] = set()  # steps that a person has removed
        self.open()
        self.launch()

    def open(self) -> None:
        """A daemon starts on this root."""
        self.mortal = MortalTier(self.tier)
        database = Catalog.open(sqlite_url(f"{self.directory.name}/catalog.sqlite")).database
        self.catalog = Catalog(database, clock=lambda: self.time)
        self.control = Control(stored_in(self.mortal), self.catalog, None)  # type: ignore[arg-type]
        self.control.trash._clock = lambda: self.clock
        self.control.recovery.recover()
        assert self.control.record_queue.recorded(30)
        self.rotation = self.control.rotation
        assert self.rotation.wait_until_applied()
        far = stored_in(self.far)
        self.replicator = Replicator(
            "far",
            self.mortal,
            lambda: far,
            self.control.replicas,
            news=lambda seconds: False,  # type: ignore[arg-type]
        )

    def close(self) -> None:
        self.control.close()
        self.catalog.close()

    def launch(self) -> None:
        """A training begins at nothing."""
        self.launches += 1
        self.attempt = self.control.launches.declare(self.run, f"launch-{self.launches}", 1, None)
        assert self.control.record_queue.recorded(30)
        self.way: lineage.Way = ()
        self.saved_at: dict[int, float] = {}

    def moment(self, clock: str) -> str:
        """What a clock says, right or wrong: it may jump back, and it never says one thing twice."""
        self.ticks += 1
        return f"{clock[:-4]}{self.ticks % 1000:03d}Z"

    def standing(self, tier: MemoryTier, run: str) -> dict[int, Manifest]:
        """What a restore could read, every byte of it, of a run in a tier; at once, or when what it replaced is back."""
        there: dict[int, list[str]] = {}
        for step in PosixStore(tier).steps(run):
            there[step] = [naming.checkpoint_path(run, step)]
        for place in PosixStore(tier).replaced(run):
            there.setdefault(place.step, []).append(place.path)
        found = {step: [m for path in paths if (m := sound(tier, path)) is not None] for step, paths in there.items()}
        return {step: made[0] for step, made in found.items() if made}

    @contextmanager
    def unless_nothing_is_left(self) -> Iterator[None]:
        """Of a deleted run even the last copy may have gone: the run is unknown then."""
        there = self.sound
        try:
            yield
        except NoSuchRun:
            assert not there

    @property
    def sound(self) -> dict[int, Manifest]:
        return self.standing(self.tier, self.run)

    def is_sound(self, step: int) -> bool:
        return sound(self.tier, naming.checkpoint_path(self.run, step)) is not None

    def step_of(self, age: int) -> int:
        """The newest that stands, or one before it."""
        there = self.control.store.steps(self.run)
        return there[-1 - age] if age < len(there) else 0

    def restorable(self, there: dict[int, Manifest] | None = None) -> Restorable:
        """Of the line of training that lives."""
        there = self.sound if there is None else there
        way = lineage.way(there.values())
        living = [made for made in there.values() if lineage.is_on(way, made)]
        return {g: max((m.step for m in living if set(g) <= set(m.tensors)), default=None) for g in GROUPS}

    @initialize(groups=st.sampled_from(GROUPS))
    def begin(self, groups: tuple[str, ...]) -> None:
        for clock in CLOCKS:
            self.save(groups, clock, True, healthy=True)

    @rule(groups=st.sampled_from(GROUPS), clock=st.sampled_from(CLOCKS), verified=OFTEN, healthy=OFTEN)
    def save(self, groups: tuple[str, ...], clock: str, verified: bool, healthy: bool) -> None:
        self.next += 1
        self.time += 1.0
        base = a_manifest(self.run, self.next, self.attempt, groups)
        made = msgspec.structs.replace(base, created=self.moment(clock), rewinds=self.way)
        put_checkpoint(self.tier, made)
        self.catalog.record_checkpoint(bodies.describe(made).model_copy(update={"healthy": healthy}))
        self.saved_at[self.next] = self.time
        if verified:
            self.check(self.next)

    @rule(age=AGES)
    def check_one(self, age: int) -> None:
        self.check(self.step_of(age))

    def check(self, step: int) -> None:
        """As the daemon does: read back, then recorded."""
        before = self.restorable()
        found = examine(self.tier, naming.checkpoint_path(self.run, step))
        if not found.damages and found.manifest is not None:
            self.control.findings.sound(self.run, step)  # after which the policy is applied
        elif self.tier.list(naming.checkpoint_path(self.run, step)):
            self.control.findings.damaged(self.run, step, found.damages[0], checked=True)
        assert self.rotation.wait_until_applied()
        assert self.restorable() == before

    @rule(age=AGES, clock=st.sampled_from(CLOCKS), flips=st.booleans(), killed=st.integers(0, 24))
    def replace(self, age: int, clock: str, flips: bool, killed: int) -> None:
        """Another checkpoint takes the place of one of its step; a bit of it flips before it is read back, or the daemon is
        killed at any of its acts.
        """
        step = self.step_of(age)
        try:
            groups = tuple(roots.load_manifest(self.tier, self.run, step).groups)
        except CheckpointError:
            groups = GROUPS[-1]
        begins_a_line = lineage.way(self.sound.values()) != self.way  # and so leaves behind what is newer
        if begins_a_line or not self.tier.list(naming.checkpoint_path(self.run, step)):
            return
        before = self.restorable()
        base = a_manifest(self.run, step, self.attempt, groups)
        made = msgspec.structs.replace(base, created=self.moment(clock), rewinds=self.way)
        place, encoded = Place(self.run, step, self.attempt), manifests.encode(made)
        self.tier.remove_tree(place.path)
        self.tier.put(f"{place.path}/{naming.STATE}", b"{}")
        self.mortal.left = killed if killed < 20 else float("inf")
        try:
            with self.rotation.replacing(self.run, step):
                commit.publish_copy(self.control.store, place, encoded, manifests.encode_commit(made, encoded), over=True)
            self.control.publishing._replaced(self.run, step)
            self.mortal.left = float("inf")
        except Killed:
            self.restart()
        self.saved_at[step] = self.time
        came = sound(self.tier, naming.checkpoint_path(self.run, step)) == made  # a death may leave the one before it
        if flips and came and any(sound(self.tier, p.path) for p in self.control.store.replaced(self.run) if p.step == step):
            hurt(self.tier, f"{naming.checkpoint_path(self.run, step)}/{naming.STATE}", "flipped")
            self.check(step)
        after = self.restorable()
        assert all((after[g] or 0) >= (before[g] or 0) for g in GROUPS)

    @rule()
    def restart(self) -> None:
        before = self.restorable()
        self.mortal.left = 0
        self.close()
        self.open()
        after = self.restorable()  # a save that was killed when it was whole may have come in the place of a damaged one
        assert all((after[g] or 0) >= (before[g] or 0) for g in GROUPS), (before, after)

    @rule(jump_s=st.sampled_from([0.0, 3600.0, 400 * DAY_S, -400 * DAY_S]), room=st.booleans())
    def empty_the_trash(self, jump_s: float, room: bool) -> None:
        """By age, with any clock, or for room: what was deleted stays while what came in its place is not sound."""
        self.clock += jump_s
        before, entries = self.restorable(), {entry.entry: entry.run for entry in self.control.trash.entries()}
        if room:
            self.control.trash.make_room(2**60, "a save")
        else:
            self.control.trash.expire()
        assert self.restorable() == before
        gone = entries.keys() - {entry.entry for entry in self.control.trash.entries()}
        for entry in gone:
            assert not self.control.store.steps(entries[entry]) or self.standing(self.tier, entries[entry])

    @rule(jump_s=st.sampled_from([0.0, 3600.0, 400 * DAY_S, -400 * DAY_S]))
    def delete_and_bring_back(self, jump_s: float) -> None:
        """Also where a clock jumps in between."""
        before = self.restorable()
        with suppress(Conflict, NoSuchResource):  # the second: nothing of it was there
            made = self.control.trash.delete(self.run)  # refused where only copies are sound
            self.control.trash.expire()
            self.clock += jump_s
            self.control.trash.expire()
            self.control.trash.undelete(self.run, made.entry)
        assert self.rotation.wait_until_applied()
        after = self.restorable()  # of a run without checkpoints, what was deleted before comes back
        assert all((after[g] or 0) >= (before[g] or 0) for g in GROUPS), (before, after)

    @rule(clock=st.sampled_from(CLOCKS), verified=st.booleans())
    def delete_and_begin_again(self, clock: str, verified: bool) -> None:
        try:
            self.control.trash.delete(self.run, marked=True)
        except Conflict:
            return
        self.far.remove_tree(self.run)
        self.launch()
        self.save(GROUPS[-1], clock, verified, healthy=True)

    @rule()
    def rename(self) -> None:
        name, before = next(one for one in RUNS if one != self.run), self.restorable()
        try:
            self.control.renaming.rename(self.run, name)
        except CheckpointError:
            assert self.restorable() == before
            return
        self.run = name
        assert self.rotation.wait_until_applied()
        assert self.restorable() == before

    @rule()
    def copy(self) -> None:
        """To a replica, where copies follow what became of their checkpoints, and go."""
        before, here = self.anywhere(), self.restorable()
        for _ in range(50):
            if not self.replicator.run_once():
                break
        after = self.anywhere()
        assert self.restorable() == here
        assert all((after[g] or 0) >= (before[g] or 0) for g in GROUPS)

    @rule(age=AGES, file=st.sampled_from(FILES), how=HOWS)
    def damage_a_copy(self, age: int, file: str, how: str) -> None:
        there = PosixStore(self.far).steps(self.run)
        if age < len(there):
            hurt(self.far, f"{naming.checkpoint_path(self.run, there[-1 - age])}/{file}", how)

    def anywhere(self) -> Restorable:
        """In the root, or as a copy in the replica; but for copies of what a person has removed, which go as well."""
        copies = {step: made for run in RUNS for step, made in self.standing(self.far, run).items()}
        kept = {step: made for step, made in copies.items() if step not in self.asked}
        return self.restorable({**kept, **self.sound})

    @rule(seconds=st.floats(0.1, 1000))
    def time_passes(self, seconds: float) -> None:
        self.time += seconds

    @precondition(lambda self: self.sound)
    @rule(back=st.integers(1, 3))
    def rewind(self, back: int) -> None:
        """The next launch goes on from an older step."""
        steps = sorted(self.sound)
        self.attempt += 1
        self.way = (*self.way, Rewind(self.attempt, 1, steps[-min(back, len(steps))]))

    @rule(age=AGES, file=st.sampled_from(FILES), how=HOWS)
    def damage(self, age: int, file: str, how: str) -> None:
        hurt(self.tier, f"{naming.checkpoint_path(self.run, self.step_of(age))}/{file}", how)

    @rule(age=AGES)
    def remove_by_hand_one(self, age: int) -> None:
        step = self.step_of(age)
        self.tier.remove_tree(naming.checkpoint_path(self.run, step))

    @rule(policy=POLICIES)
    def keep(self, policy: RetentionPolicy) -> None:
        before, there = self.restorable(), self.sound
        with self.unless_nothing_is_left():
            self.rotation.set_policy(self.run, policy, "*")
        assert self.rotation.wait_until_applied()
        assert self.restorable() == before
        if policy.within_seconds is not None:
            newest = max(self.saved_at.values(), default=0.0)
            gone = there.keys() - self.sound.keys()
            assert all(newest - self.saved_at[step] > policy.within_seconds for step in gone)

    @rule()
    def apply_again(self) -> None:
        before = self.restorable()
        with self.unless_nothing_is_left():
            self.rotation.apply(self.run)
        assert self.restorable() == before

    @rule()
    def make_room(self) -> None:
        before = self.restorable()
        self.rotation.make_room(self.run, Candidate(self.next + 1, 0.0, groups=frozenset(GROUPS[-1])))
        assert self.restorable() == before

    @rule(age=AGES)
    def remove_one(self, age: int) -> None:
        step = self.step_of(age)
        before, verified = self.restorable(), self.control.findings.result_of(self.run, step) == "sound"
        with self.unless_nothing_is_left(), suppress(Conflict, NoSuchCheckpoint):
            self.rotation.remove(self.run, step)
            self.asked.add(step)
        if verified:  # of what nobody has verified, a person says whether it goes
            assert self.restorable() == before

    @rule()
    def thin(self) -> None:
        """What is thinned loses its optimizer, so a newer one has that."""
        before = self.restorable()
        for due in self.control.thinning.due(self.run):
            assert due.step not in before.values()

    @rule()
    def look(self) -> None:
        before = self.restorable()
        self.control.watch.scan()
        assert self.restorable() == before
        listed = {made.step for made in self.catalog.checkpoints(self.run, None, 100).items}
        assert listed <= set(self.control.store.steps(self.run))
        assert all(self.is_sound(made.step) for made in self.catalog.checkpoints(self.run, None, 100).items if made.verified)

    @invariant()
    def nothing_is_left_half_removed(self) -> None:
        assert self.tier.list(f"{self.run}/{naming.TRASH}") == []

    def teardown(self) -> None:
        self.close()
        self.patched.stop()
        self.directory.cleanup()


def sound(tier: Tier, directory: str) -> Manifest | None:
    found = examine(tier, directory)
    return None if found.damages else found.manifest


def hurt(tier: MemoryTier, path: str, how: str) -> None:
    if tier.size(path) is None:
        return
    data = tier.read(path)
    tier.remove_file(path)
    if how != "gone":
        tier.put(path, data[:-1] if how == "cut" else bytes([data[0] ^ 1]) + data[1:])
