"""Every fault, done to one peer. Each is done to a job of its own, or to a copy of what a job has left."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import Failed
from tests.crash.disks import memory_disk

from .damage import CUT_BYTES, Ballast, checkpoint_files, cut, flip
from .events import BEGIN, DURABLE, FAILED, READY, SAVED
from .job import Job
from .judge import Kind, Outcome, judge
from .peers import Spec
from .trainer import EVERYTHING, TRAINER

STEPS = (1, 2, 3)
DURING, RETURNED, GONE, FLIP, CUT, MISSING, FULL = "during", "returned", "gone", "flip", "cut", "missing", "full"
FAULTS = (DURING, RETURNED, GONE, FLIP, CUT, MISSING, FULL)
DISK_IN_STATES = 4  # room for two checkpoints, a half, and what else a peer writes
OTHER_BYTES = 64 * 2**20


class Plan(NamedTuple):
    """How often, and on what."""

    home: Path
    state_bytes: int
    runs: int
    kills: int
    seed: int
    faults: tuple[str, ...] = FAULTS


class Result(NamedTuple):
    """One fault once. `late` ones came when the save was complete, and say nothing of it."""

    fault: str
    what: str
    outcome: Outcome
    late: bool = False
    sees: str = ""  # what the trainer was told, where the disk was full


class Campaign:
    def __init__(self, plan: Plan, spec: Spec, python: Path) -> None:
        self._plan, self._spec, self._python = plan, spec, python
        self._home = plan.home / spec.name
        self._dice = random.Random(f"{plan.seed}-{spec.name}")
        self.versions: dict[str, str] = {}
        self.errors: dict[str, str] = {}  # by fault: why it has no result, or not all

    def run(self) -> Iterator[Result]:
        """A run with no fault first: who cannot resume from that is not put to the test, and `Failed` is raised."""
        shutil.rmtree(self._home, ignore_errors=True)
        with self._job("clean") as job:
            files = self._clean(job)
            yield from self._damaged(job, files)
        by_fault: dict[str, Callable[[], Iterator[Result]]]
        by_fault = {DURING: self._during, RETURNED: self._returned, GONE: self._gone, FULL: self._full}
        for fault, act in by_fault.items():
            if fault in self._plan.faults:
                try:
                    yield from act()
                except Failed as failure:
                    self.errors[fault] = str(failure)
        shutil.rmtree(self._home, ignore_errors=True)

    def _clean(self, job: Job) -> list[str]:
        """Three saves and an end in order; the names of the newest checkpoint's files, the largest first."""
        with job.running(), job.train(steps=STEPS, seed=self._plan.seed) as training:
            events = training.rest()
        failed = [event for event in events if event["what"] == FAILED]
        if failed:
            raise Failed(f"{failed[0]['where']}: {failed[0]['error']}")
        job.begin_anew(beside=False)
        shutil.move(job.data, self._pristine)
        self._restore(job)
        outcome = self._resume(job)
        if outcome.kind is not Kind.NEWEST:
            raise Failed(f"it does not resume where there was no fault: {outcome.kind.value}: {outcome.error}")
        where = self._pristine / self._spec.files.format(step=STEPS[-1])
        found = checkpoint_files(where)
        if self._spec.tracker:
            found.append(self._pristine / self._spec.tracker)
        return [str(path.relative_to(self._pristine)) for path in found]

    def _damaged(self, job: Job, files: list[str]) -> Iterator[Result]:
        for _ in range(self._plan.runs if FLIP in self._plan.faults else 0):
            self._restore(job)
            yield Result(FLIP, flip(job.data / files[0], self._dice), self._resume(job, files[0]))
        long = [name for name in files if (self._pristine / name).stat().st_size > CUT_BYTES]
        for number in range(self._plan.runs if CUT in self._plan.faults else 0):
            name = long[number % len(long)]  # a peer's largest file may end with bytes that nobody reads
            self._restore(job)
            cut(job.data / name)
            yield Result(CUT, name, self._resume(job, name))
        for name in files if MISSING in self._plan.faults else ():
            self._restore(job)
            (job.data / name).unlink()
            yield Result(MISSING, name, self._resume(job, name))

    def _during(self) -> Iterator[Result]:
        """Killed at points spread over the time that the save before took until the peer said that it was complete."""
        for number in range(self._plan.kills):
            part = (number + 0.5) / self._plan.kills
            with self._job(f"during-{number}") as job, job.running():
                with job.train(steps=STEPS, seed=self._seed()) as training:
                    seconds = training.until(DURABLE, STEPS[-2])["seconds"]
                    training.until(BEGIN, STEPS[-1])
                    time.sleep(part * seconds)
                    training.kill()
                    ends = [event["what"] for event in training.rest() if event.get("step") == STEPS[-1]]
                job.tell_of_death()
                yield Result(DURING, f"{part:.2f} of {seconds:.3f} s", self._judge(job), late=DURABLE in ends)

    def _returned(self) -> Iterator[Result]:
        for number in range(self._plan.runs):
            with self._job(f"returned-{number}") as job, job.running():
                self._die(job, TRAINER)
                job.tell_of_death()
                yield Result(RETURNED, "", self._judge(job))

    def _gone(self) -> Iterator[Result]:
        for number in range(self._plan.runs):
            with self._job(f"gone-{number}") as job, job.running():
                self._die(job, EVERYTHING)
                job.begin_anew()
                yield Result(GONE, "", self._judge(job))

    def _die(self, job: Job, who: str) -> None:
        with job.train(steps=STEPS, seed=self._seed(), dies=who) as training:
            events = training.rest()
        last = [event["what"] for event in events if event.get("step") == STEPS[-1]]
        if last != [BEGIN]:
            raise Failed(f"the trainer did not die when its save returned: {events[-1]}")

    def _full(self) -> Iterator[Result]:
        if os.geteuid() != 0:
            raise Failed("only root can mount a small disk")
        for number in range(self._plan.runs):
            folder = self._home / f"full-{number}"
            folder.mkdir(parents=True)
            size = self._plan.state_bytes * DISK_IN_STATES + OTHER_BYTES
            with (
                memory_disk(folder / "disk", str(size)) as disk,
                self._job(folder.name, disk / "data") as job,
                job.running(),
            ):
                sees = self._fill_up(job, disk)
                job.begin_anew()
                yield Result(FULL, "", self._judge(job), sees=sees)

    def _fill_up(self, job: Job, disk: Path) -> str:
        """Half of what a save needs is free when the last one begins, and stays free; what the trainer is told of it."""
        with job.train(steps=STEPS, seed=self._seed(), pauses=True) as training:
            training.until(DURABLE, STEPS[-2])
            training.until(READY)
            ballast = Ballast(disk / "ballast", self._plan.state_bytes // 2)
            if self._spec.overwrites:
                ballast.takes_what_is_given_back(training.process.pid)
            training.go_on()
            events = training.rest()
        told = [event for event in events if event["what"] == FAILED]
        if told:
            return f"{told[0]['where']}: {told[0]['error']}"
        last = [event["what"] for event in events if event.get("step") == STEPS[-1]]
        return "that it is saved" if last[-1] in (SAVED, DURABLE) else "nothing"

    def _resume(self, job: Job, damaged: str = "") -> Outcome:
        with job.running():
            return self._judge(job, damaged)

    def _judge(self, job: Job, damaged: str = "") -> Outcome:
        report, versions = job.resume()
        self.versions |= versions
        return judge(job.saved(), report, [Path(damaged).name] if damaged else [])

    def _seed(self) -> int:
        return self._dice.randrange(2**20)

    @contextmanager
    def _job(self, name: str, data: Path | None = None) -> Iterator[Job]:
        job = Job(self._spec, self._python, self._home / name, self._plan.state_bytes, data)
        try:
            yield job
        finally:
            job.end()

    @property
    def _pristine(self) -> Path:
        return self._home / "pristine"

    def _restore(self, job: Job) -> None:
        """What the job left, at its place, with nothing of it in memory."""
        job.begin_anew(beside=False)
        shutil.rmtree(job.data, ignore_errors=True)
        shutil.copytree(self._pristine, job.data, symlinks=True)


def as_json(result: Result) -> dict[str, Any]:
    return result._asdict() | {"outcome": result.outcome._asdict() | {"kind": result.outcome.kind.value}}


def from_json(found: dict[str, Any]) -> Result:
    outcome = Outcome(**(found["outcome"] | {"kind": Kind(found["outcome"]["kind"])}))
    return Result(**(found | {"outcome": outcome}))
