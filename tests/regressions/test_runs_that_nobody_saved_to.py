"""Runs to which nothing was ever saved: nobody makes any number of them, and they are not listed for ever."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast_formats.errors import LimitExceeded, NoSuchRun, StorageFailed
from holdfast_formats.rest import bodies
from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_formats.staging import wire
from holdfast_service.control.checkpoints import roots
from holdfast_service.control.retention import empty_runs
from holdfast_service.control.retention.empty_runs import EmptyRuns
from holdfast_service.daemon.arena.shares import ShareRequester
from holdfast_service.daemon.remote import RemoteRanks
from holdfast_service.daemon.remote_rank import RemoteRank
from holdfast_service.daemon.saving.run_lifecycle import RunLifecycles
from holdfast_service.daemon.saving.sweeping import Sweeper
from holdfast_service.storage import PosixTier, Tier
from tests.crash.test_faults import ACTS, FaultyTier, Plan
from tests.daemon.saver_world import SaverWorld

NEVER_S = 1e9
LATER_S = empty_runs.KEPT_S + 60


class Place(NamedTuple):
    """A daemon's parts over a root. What is `later` happens when the hours have passed."""

    world: SaverWorld
    ranks: RemoteRanks
    sweeper: Sweeper

    def hello(self, run: str, tenant: str = "", launch: str = "one") -> RemoteRank:
        about = {"protocol": wire.PROTOCOL, "run": run, "rank": 0, "world": 1, "launch": launch}
        return self.ranks.hello(uuid.uuid4().hex, bodies.RankHello(**about), ShareRequester(tenant, owner=True))

    def visit(self, run: str) -> None:
        """A rank says hello, keeps the newest two, and leaves."""
        rank_id = uuid.uuid4().hex
        about = {"protocol": wire.PROTOCOL, "run": run, "rank": 0, "world": 1, "launch": rank_id, "keep_last": 2}
        self.ranks.hello(rank_id, bodies.RankHello(**about))
        self.ranks.leave(rank_id)
        RunLifecycles(self.world.saver, self.world.control).record()

    def sweep_later(self) -> list[str]:
        """What is swept when the hours have passed, and who is here now is still here."""
        RunLifecycles(self.world.saver, self.world.control).record()
        empty = self.world.control.empty_runs
        empty._clock = empty_runs.time.monotonic
        empty._missed.clear()
        assert self.sweeper.sweep() == []
        empty._clock = lambda: empty_runs.time.monotonic() + LATER_S
        return self.sweeper.sweep()

    @property
    def known(self) -> set[str]:
        return set(self.world.control.attempts.known())


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    return PosixTier(tmp_path / "root")


@pytest.fixture
def plan() -> Plan:
    return Plan()


@pytest.fixture
def place(tier: Tier, plan: Plan) -> Iterator[Place]:
    world = SaverWorld(FaultyTier(tier, plan))
    world.control.recovery.recover()
    ranks = RemoteRanks(world.arena, world.saver, world.control)
    sweeper = Sweeper(world.control.empty_runs, world.saver, world.arena, NEVER_S)
    yield Place(world, ranks, sweeper)
    sweeper.close()
    ranks.close()
    world.close()


def test_nobody_makes_any_number_of_runs(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many hellos of other names by one token, then a refusal with what to do; others and known runs go on."""
    monkeypatch.setattr(empty_runs, "EMPTY_RUNS_MAX", 10)
    refusals = []
    for number in range(30):
        try:
            place.hello(f"team-{number}", "team")
        except LimitExceeded as error:
            refusals.append(error)
    assert len(place.known) == 10 and len(refusals) == 20
    assert "team already has 10" in refusals[0].detail and "save to them first" in refusals[0].hint
    place.hello("team-3", "team", launch="again")
    place.hello("somebody-else", "others")
    (rank,) = place.world.launch(1)  # of a run that is saved to
    rank.save(1)
    assert rank.wait(1).state == "committed"
    assert place.sweep_later() == [], "their ranks are here"


def test_a_run_that_was_saved_to_counts_no_more(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever saves to his runs may make any number of them."""
    monkeypatch.setattr(empty_runs, "EMPTY_RUNS_MAX", 2)
    place.hello("a", "team")
    place.hello("b", "team")
    with pytest.raises(LimitExceeded):
        place.hello("c", "team")
    place.world.tier.put("a/checkpoints/step-0000000000001/COMMIT", b"")
    place.hello("c", "team")


def test_what_nobody_saved_to_is_swept_after_hours(place: Place, tier: Tier, tmp_path: Path) -> None:
    """Directory, attempts and the catalog's row go, and an event says so; not a moment after the ranks have gone."""
    place.visit("gone")
    assert place.sweeper.sweep() == [] and place.world.catalog.run("gone").attempt == 1
    assert place.sweep_later() == ["gone"]
    assert place.known == set() and roots.runs(tier) == [] and "gone" not in os.listdir(tmp_path / "root")
    with pytest.raises(NoSuchRun):
        place.world.catalog.run("gone")
    (event,) = place.world.control.events.after(0, 10, "gone", "run-swept")
    assert event.detail == {"attempt": 1}
    place.visit("gone")
    assert place.world.control.attempts.newest("gone") == 1, "it is made anew"
    assert place.world.catalog.run("gone").attempt == 1 and place.world.control.attempts.known()["gone"].life == "finished"


def keep(place: Place, why: str, run: Path) -> None:
    """Make the run one that is to be kept."""
    if why == "policy":
        place.world.control.rotation.set_policy(run.name, RetentionPolicy(last=3), "*")
    elif why == "pin":
        place.world.control.files.change(run.name, lambda file: file.model_copy(update={"pins": (1,)}))
    elif why == "checkpoint":
        (run / "checkpoints/step-0000000000001").mkdir(parents=True)
    elif why == "foreign-file":
        (run / "notes.txt").write_text("mine")
    elif why == "foreign-file-in-a-room":
        (run / "staging").mkdir()
        (run / "staging/mine").write_text("mine")
    elif why == "linked-run-file":
        (run / "run.json").rename(run.parent.parent / "run.json")
        (run / "run.json").symlink_to(run.parent.parent / "run.json")
    elif why == "linked-room":
        (run / "trash").symlink_to(run.parent.parent)
    elif why == "unreadable-run-file":
        (run / "run.json").write_text("{")
    elif why == "rank":
        place.hello(run.name, launch="two")


WHYS = (
    *("policy", "pin", "checkpoint", "foreign-file", "foreign-file-in-a-room", "linked-run-file", "linked-room"),
    *("unreadable-run-file", "rank"),
)


def test_what_somebody_may_want_is_never_swept(place: Place, tmp_path: Path) -> None:
    """What a person set, what is not ours, a checkpoint, a rank that is here: nothing of the run is touched."""
    root = tmp_path / "root"
    for why in WHYS:
        place.visit(why)
        keep(place, why, root / why)
    place.visit("bare")
    assert place.world.control.record_queue.recorded(10)
    before = {path: path.lstat().st_mtime_ns for why in WHYS for path in (root / why).rglob("*")}
    known = {run: declared.launches for run, declared in place.world.control.attempts.known().items() if run != "bare"}
    listed = {run: made for run, made in place.world.catalog.declared().items() if run != "bare"}
    assert place.sweep_later() == ["bare"]
    assert {path: path.lstat().st_mtime_ns for why in WHYS for path in (root / why).rglob("*")} == before
    assert {run: declared.launches for run, declared in place.world.control.attempts.known().items()} == known
    assert place.world.catalog.declared() == listed


def test_what_once_had_checkpoints_keeps_its_attempts(place: Place) -> None:
    """A run whose checkpoints were all removed, or whose directory is away, has its numbers still."""
    (rank,) = place.world.launch(1)
    rank.save(1)
    assert rank.wait(1).state == "committed" and place.world.control.record_queue.recorded(10)
    rank.leave()
    place.world.tier.remove_tree("run")
    run = rank.who.run
    place.world.tier.remove_tree(run)
    RunLifecycles(place.world.saver, place.world.control).record()
    assert place.sweep_later() == [] and place.world.control.attempts.newest(run) == 1


def test_a_hello_between_the_look_and_the_removal(place: Place, tier: Tier) -> None:
    """Whichever is first, the rank has its run in the end: in the file of attempts and in the catalog."""

    class Interrupted(EmptyRuns):
        """In which somebody says hello at the moment that is asked for."""

        moment = ""

        def sweep(self, run: str, declared: object) -> bool:
            if self.moment == "sweep":  # the lock is held: the hello waits for the end of this
                thread = threading.Thread(target=place.hello, args=(run,), kwargs={"launch": "late"})
                thread.start()
                threads.append(thread)
            return super().sweep(run, declared)  # type: ignore[arg-type]

        def forget(self, run: str) -> bool:
            if self.moment == "forget":
                place.hello(run, launch="late")
            found = super().forget(run)
            if self.moment == "forgotten":
                place.hello(run, launch="late")
            return found

    threads: list[threading.Thread] = []
    control = place.world.control
    parts = (place.world.tier, place.world.catalog, control.attempts, control.files, control.events)
    empty = Interrupted(*parts, kept_s=-60)
    sweeper = Sweeper(empty, place.world.saver, place.world.arena, NEVER_S)
    for moment, attempt in (("forget", 2), ("forgotten", 2), ("sweep", 1)):
        run = f"at-{moment}"
        place.visit(run)
        empty.moment = moment
        assert sweeper.sweep() == ([run] if moment == "sweep" else [])
        for thread in threads:
            thread.join()
        assert control.attempts.newest(run) == attempt and control.record_queue.recorded(10)
        assert place.world.catalog.run(run).attempt == attempt
        assert place.world.saver.connected.runs >= {run}
    sweeper.close()


def test_a_fault_at_every_act_of_a_sweep(place: Place, plan: Plan) -> None:
    """Whatever fails, the run is known or gone as a whole afterwards: a hello works, and a later sweep does the rest."""
    place.world.control.empty_runs._kept_s = 0.0
    for kind in ACTS:
        for number in count(1):
            run = f"{kind.replace('_', '-')}-{number}"
            place.visit(run)
            plan.kind, plan.seen, plan.failed, plan.fail_at = kind, 0, "", number
            with suppress(StorageFailed):
                place.sweeper.sweep()
            plan.fail_at = 0
            failed = plan.failed
            attempt = place.world.control.attempts.newest(run)
            listed = place.world.catalog.declared()
            assert all(made.attempt <= place.world.control.attempts.newest(name) for name, made in listed.items())
            place.visit(run)
            assert place.world.control.attempts.newest(run) == attempt + 1
            assert run in place.sweeper.sweep() and run not in place.known
            if not failed:
                break
            assert number < 40, "a sweep takes more acts than this test looks at"
