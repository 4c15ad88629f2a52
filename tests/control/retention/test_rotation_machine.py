"""Rotation over any history: whatever happens in whatever order, what must stay is there (I4, I10)."""

from __future__ import annotations

import tempfile

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from holdfast_formats import naming
from holdfast_formats.errors import Conflict, NoSuchCheckpoint
from holdfast_formats.rest.retention import Best, RetentionPolicy
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.checkpoints import run_files
from holdfast_service.control.checkpoints.readers import Readers
from holdfast_service.control.checkpoints.run_files import RunFiles
from holdfast_service.control.retention.policy import Candidate
from holdfast_service.control.retention.rotation import Rotation
from holdfast_service.storage import MemoryTier, PosixStore
from tests.control.published import a_manifest, a_row, mark_verified, put_checkpoint
from tests.databases import sqlite_url
from tests.in_memory import memory

RUN = "run"
STEPS = st.integers(0, 12)
POLICIES = st.builds(
    RetentionPolicy,
    last=st.none() | st.integers(1, 3),
    every_steps=st.none() | st.integers(1, 5),
    best=st.sampled_from([(), (Best(metric="loss", count=1),)]),
)


class Rotating(RuleBasedStateMachine):
    """Saves, verifications, marks, readers, policies and removals; `there` is what no rule of this machine has seen go."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory(dir=memory())
        self.tier = MemoryTier()
        self.catalog = Catalog.open(sqlite_url(f"{self.directory.name}/catalog.sqlite"))
        self.readers = Readers()
        self.rotation = Rotation(PosixStore(self.tier), self.catalog, RunFiles(self.tier), self.readers)
        self.catalog.declare_attempt(RUN, "launch", 1, "now")
        self.next = 0
        self.verified: set[int] = set()
        self.pinned: set[int] = set()
        self.read: set[int] = set()

    @property
    def there(self) -> set[int]:
        names = self.tier.list(f"{RUN}/{naming.CHECKPOINTS}")
        return {step for step in map(naming.parse_step_directory, names) if step is not None}

    @property
    def newest(self) -> int:
        return max(self.verified & self.there, default=-1)

    @rule(verified=st.booleans())
    def save(self, verified: bool) -> None:
        self.next += 1
        put_checkpoint(self.tier, a_manifest(RUN, self.next))
        self.catalog.record_checkpoint(a_row(RUN, self.next, verified))
        if verified:
            self.verified.add(self.next)

    @rule(step=STEPS)
    def verify(self, step: int) -> None:
        mark_verified(self.catalog, RUN, step)
        if step in self.there:
            self.verified.add(step)

    @rule(step=STEPS, set_it=st.booleans())
    def mark(self, step: int, set_it: bool) -> None:
        if not set_it:
            self.rotation.unmark(RUN, lambda file: run_files.unpinned(file, step))
            self.pinned.discard(step)
        elif step in self.there:
            self.rotation.mark(RUN, step, lambda file: run_files.pinned(file, step))
            self.pinned.add(step)
        assert self.rotation.wait_until_applied()

    @rule(step=STEPS, begin=st.booleans())
    def reader(self, step: int, begin: bool) -> None:
        if begin and step in self.there:
            self.readers.hold(RUN, step, "reader", 1000)
            self.read.add(step)
        elif not begin:
            self.readers.release(RUN, step, "reader")
            self.read.discard(step)
        assert self.rotation.wait_until_applied()

    @rule(policy=POLICIES)
    def keep(self, policy: RetentionPolicy) -> None:
        before, newest, held = self.there, self.newest, self.pinned | self.read
        foreseen = {v.step for v in self.rotation.verdicts.preview(RUN, policy).verdicts if not v.keep}
        self.rotation.set_policy(RUN, policy, "*")
        assert self.rotation.wait_until_applied()
        gone = before - self.there
        assert gone == foreseen
        assert not gone & held
        assert all(step < newest for step in gone)
        assert self.rotation.apply(RUN) == []

    @rule()
    def make_room(self) -> None:
        newest, held = self.newest, self.pinned | self.read
        step = self.rotation.make_room(RUN, Candidate(self.next + 1, 0.0, groups=frozenset({"model"})))
        assert step is None or (step < newest and step not in held and step not in self.there)

    @precondition(lambda self: self.there)
    @rule(step=STEPS)
    def remove(self, step: int) -> None:
        newest, held, there = self.newest, self.pinned | self.read, self.there
        try:
            self.rotation.remove(RUN, step)
        except NoSuchCheckpoint:
            assert step not in there
        except Conflict:
            assert step in held or step == newest
            assert step in self.there
        else:
            assert step in there - held and step != newest

    @invariant()
    def what_must_stay_is_there(self) -> None:
        """Pins and readers hold, the catalog lists what is there, and nothing is left in the trash."""
        there = self.there
        assert (self.pinned | self.read) <= there
        assert {c.step for c in self.catalog.checkpoints(RUN, None, 100).items} == there
        assert self.tier.list(f"{RUN}/{naming.TRASH}") == []

    def teardown(self) -> None:
        self.rotation.close()
        self.catalog.close()
        self.directory.cleanup()


TestRotating = Rotating.TestCase
TestRotating.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
