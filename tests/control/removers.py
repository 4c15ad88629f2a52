"""All removers of a root in which anything may be damaged or gone: what could be restored before can be restored after."""

from __future__ import annotations

import tempfile
from contextlib import suppress

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast_formats import lineage, naming
from holdfast_formats.disk.manifest import Manifest
from holdfast_formats.errors import Conflict, NoSuchCheckpoint
from holdfast_formats.lineage import Rewind
from holdfast_formats.rest import bodies
from holdfast_formats.rest.retention import Best, RetentionPolicy
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.decisions import Decisions
from holdfast_service.control.retention.policy import Candidate
from holdfast_service.daemon.checking.verifier import examine
from holdfast_service.storage import MemoryTier
from tests.control.published import a_manifest, put_checkpoint
from tests.databases import sqlite_url
from tests.in_memory import memory

RUN = "run"
GROUPS = (("model",), ("model", "optim"))
FILES = (naming.COMMIT, naming.MANIFEST, naming.STATE)
CLOCKS = ("1970-01-01T00:00:00.000Z", "2026-11-28T01:00:00.000Z", "2026-11-28T03:00:00.000Z", "9999-01-01T00:00:00.000Z")
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


class Removers(RuleBasedStateMachine):
    """Saves with any clock, time that passes, damage of any file, policies, and everything that removes."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory(dir=memory())
        self.tier, self.time = MemoryTier(), 0.0
        database = Catalog.open(sqlite_url(f"{self.directory.name}/catalog.sqlite")).database
        self.catalog = Catalog(database, clock=lambda: self.time)
        self.decisions = Decisions(self.tier, self.catalog, None)
        self.decisions.recover()
        self.decisions.hello(RUN, "launch", 1, None)
        assert self.decisions.recorded(30)
        self.rotation = self.decisions.rotation
        self.next, self.attempt = 0, 1
        self.way: lineage.Way = ()
        self.made: dict[int, Manifest] = {}
        self.saved_at: dict[int, float] = {}
        self.within: int | None = None

    @property
    def sound(self) -> dict[int, Manifest]:
        """What a restore could read, every byte of it."""
        return {step: made for step, made in self.made.items() if self.is_sound(step)}

    def step_of(self, age: int) -> int:
        """The newest that stands, or one before it."""
        there = self.decisions.store.steps(RUN)
        return there[-1 - age] if age < len(there) else 0

    def is_sound(self, step: int) -> bool:
        found = examine(self.tier, naming.checkpoint_path(RUN, step))
        return found.manifest is not None and not found.damages

    def restorable(self) -> dict[tuple[str, ...], int | None]:
        """The newest step that could be restored with each set of groups, of the line of training that lives."""
        sound = self.sound
        way = lineage.way(sound.values())
        living = [made for made in sound.values() if lineage.is_on(way, made)]
        return {g: max((m.step for m in living if set(g) <= set(m.tensors)), default=None) for g in GROUPS}

    @initialize(groups=st.sampled_from(GROUPS))
    def begin(self, groups: tuple[str, ...]) -> None:
        for clock in CLOCKS:
            self.save(groups, clock, True, healthy=True)

    @rule(groups=st.sampled_from(GROUPS), clock=st.sampled_from(CLOCKS), verified=OFTEN, healthy=OFTEN)
    def save(self, groups: tuple[str, ...], clock: str, verified: bool, healthy: bool) -> None:
        self.next += 1
        self.time += 1.0
        base = a_manifest(RUN, self.next, self.attempt, groups)
        made = Manifest(**{**{f: getattr(base, f) for f in base.__struct_fields__}, "created": clock, "rewinds": self.way})
        put_checkpoint(self.tier, made)
        self.catalog.record_checkpoint(bodies.describe(made).model_copy(update={"healthy": healthy}))
        self.made[self.next], self.saved_at[self.next] = made, self.time
        if verified:
            self.check(self.next)

    @rule(age=AGES)
    def check_one(self, age: int) -> None:
        self.check(self.step_of(age))

    def check(self, step: int) -> None:
        """As the daemon does: read back, then recorded."""
        if step in self.made and self.is_sound(step):
            before = self.restorable()
            self.decisions.findings.sound(RUN, step)  # after which the policy is applied
            assert self.rotation.settle()
            assert self.restorable() == before

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

    @rule(age=AGES, file=st.sampled_from(FILES), how=st.sampled_from(["gone", "flipped", "cut"]))
    def damage(self, age: int, file: str, how: str) -> None:
        path = f"{naming.checkpoint_path(RUN, self.step_of(age))}/{file}"
        if self.tier.size(path) is None:
            return
        data = self.tier.read(path)
        self.tier.remove_file(path)
        if how != "gone":
            self.tier.put(path, data[:-1] if how == "cut" else bytes([data[0] ^ 1]) + data[1:])

    @rule(age=AGES)
    def remove_by_hand_one(self, age: int) -> None:
        step = self.step_of(age)
        self.tier.remove_tree(naming.checkpoint_path(RUN, step))

    @rule(policy=POLICIES)
    def keep(self, policy: RetentionPolicy) -> None:
        before, there = self.restorable(), self.sound
        self.rotation.set_policy(RUN, policy, "*")
        assert self.rotation.settle()
        assert self.restorable() == before
        if policy.within_seconds is not None:
            newest = max((self.saved_at[step] for step in self.made), default=0.0)
            gone = there.keys() - self.sound.keys()
            assert all(newest - self.saved_at[step] > policy.within_seconds for step in gone)

    @rule()
    def apply_again(self) -> None:
        before = self.restorable()
        self.rotation.apply(RUN)
        assert self.restorable() == before

    @rule()
    def make_room(self) -> None:
        before = self.restorable()
        self.rotation.make_room(RUN, Candidate(self.next + 1, 0.0, groups=frozenset(GROUPS[-1])))
        assert self.restorable() == before

    @rule(age=AGES)
    def remove_one(self, age: int) -> None:
        step = self.step_of(age)
        before, verified = self.restorable(), self.decisions.findings.found(RUN, step) == "sound"
        with suppress(Conflict, NoSuchCheckpoint):
            self.rotation.remove(RUN, step)
        if verified:  # of what nobody has verified, a person says whether it goes
            assert self.restorable() == before

    @rule()
    def thin(self) -> None:
        """What is thinned loses its optimizer, so a newer one has that."""
        before = self.restorable()
        for due in self.decisions.thinning.due(RUN):
            assert due.step not in before.values()

    @rule()
    def look(self) -> None:
        before = self.restorable()
        self.decisions.watch.look()
        assert self.restorable() == before
        listed = {made.step for made in self.catalog.checkpoints(RUN, None, 100).items}
        assert listed <= set(self.decisions.store.steps(RUN))
        assert all(self.is_sound(made.step) for made in self.catalog.checkpoints(RUN, None, 100).items if made.verified)

    @invariant()
    def nothing_is_left_half_removed(self) -> None:
        assert self.tier.list(f"{RUN}/{naming.TRASH}") == []

    def teardown(self) -> None:
        self.decisions.close()
        self.catalog.close()
        self.directory.cleanup()
