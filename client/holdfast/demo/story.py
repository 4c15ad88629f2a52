"""The demo's story: a run to compare with, a run that is killed, its resumption, the proof.

With a root in a bucket, the machine is killed together with the second run, and its directory is removed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from rich.console import Console
from rich.markup import escape

from holdfast.export.copy import export
from holdfast.read.checkpoint_index import open_source, parse_target
from holdfast.read.reader import CheckpointReader
from holdfast.rest.api import Api
from holdfast_formats.errors import NoSuchResource
from holdfast_formats.naming import CHECKPOINTS, step_directory

from . import report, seaweedfs
from .config import COMMIT_S_MAX, LAUNCH_S_MAX, RANKS, STEPS, child_environment, trainer_command
from .processes import (
    POLL_S,
    DemoDaemon,
    DemoFailed,
    LaunchedJob,
    leaving_in_order,
    start_daemon,
    stop_daemon,
)
from .proof import Claim, LaunchRecord, compare_losses, compare_states, compare_weights, parse_journal

UNINTERRUPTED, RESUMED = "demo-uninterrupted", "demo"
STEPS_MIN = 8
StoreKind = Literal["directory", "s3"]


class Machine:
    """The machine of the story: its daemon, and all that this one keeps on it.

    The root is a directory of the machine, or the `bucket` at an address; then the machine can be lost.
    """

    def __init__(self, place: Path, bucket: str | None = None) -> None:
        self._place, self._bucket, self._number = place, bucket, 0
        self.start()

    def start(self) -> None:
        """Start the daemon: of a machine with nothing on it."""
        if self._bucket is None:
            (self._place / "data").mkdir(mode=0o700)
            self.daemon = start_daemon(self._place, str(self._place / "data"))
            return
        self._number += 1
        directory = self._place / f"machine-{self._number}"
        directory.mkdir(mode=0o700)
        self.daemon = start_daemon(directory, self._bucket, "--state", str(directory / "state"))

    def lose(self) -> int:
        """Kill the daemon and the holder of its memory, and remove the directory; how many processes were killed."""
        killed = self.daemon.kill()
        shutil.rmtree(self.daemon.log.parent)
        shutil.rmtree(self.daemon.socket.parent, ignore_errors=True)  # elsewhere, if the directory's path is long
        return killed


class Stage(NamedTuple):
    """Where the demo runs and prints: its directory, its machine, how many steps, on which device and how many ranks.
    `bucket` is the root's address, if it is in one.
    """

    directory: Path
    machine: Machine
    steps: int
    console: Console
    device: str = "cpu"
    ranks: int = RANKS
    bucket: str | None = None

    @property
    def daemon(self) -> DemoDaemon:
        return self.machine.daemon

    @property
    def save_every(self) -> int:
        return max(self.steps // 6, 2)

    def place(self, run: str) -> Path:
        """Where a run's trainer writes its journals, digests and log."""
        return self.directory / run

    def is_committed(self, run: str, step: int) -> bool:
        with Api(self.daemon.url) as api:
            try:
                return api.checkpoint(run, step).step == step
            except NoSuchResource:
                return False


class Killed(NamedTuple):
    """The second run's end: the newest save that must not be lost, the last step, and the number of killed processes."""

    saved: int
    step: int
    processes: int


def main(
    directory: Path,
    steps: int = STEPS,
    keep_daemon: bool = True,
    device: str = "cpu",
    store: StoreKind = "directory",
) -> int:
    """Play the demo on `device`, "cpu" or "cuda", in a fresh directory below `directory`; 0 when all claims hold, else 1.

    With the `store` "s3" checkpoints go into a bucket of a server that is started for the demo and ends with it.
    """
    console = Console(highlight=False)
    if steps < STEPS_MIN:
        console.print(f"[red]The demo needs at least {STEPS_MIN} steps.[/red]")
        return 2
    if device == "cuda" and not torch.cuda.is_available():
        console.print("[red]torch finds no CUDA device here.[/red]")
        return 2
    with leaving_in_order():
        return perform(fresh_directory(directory), steps, keep_daemon, console, device, store)


def perform(place: Path, steps: int, keep_daemon: bool, console: Console, device: str, store: StoreKind) -> int:
    """Start what serves, train and compare, print failures, and leave only what is to stay."""
    machine: Machine | None = None
    proven, say = False, partial(console.print, soft_wrap=True)
    with ExitStack() as stack:
        try:
            bucket = None
            if store == "s3":
                bucket, endpoint = stack.enter_context(seaweedfs.running(place / "bucket"))
                say(f"[bold]0[/bold]  SeaweedFS at {endpoint}, with its data in {place / 'bucket'}")
            machine = Machine(place, bucket)
            ranks = RANKS if device == "cpu" else min(RANKS, torch.cuda.device_count())
            stage = Stage(place, machine, steps, console, device, ranks, bucket)
            daemon = stage.daemon
            say(f"[bold]1[/bold]  Daemon: process {daemon.process.pid}, {daemon.url}, checkpoints in {daemon.root}")
            proven = play(stage)
        except DemoFailed as failure:
            say(f"[red bold]The demo failed:[/red bold] {escape(str(failure))}")
            report.print_log(console, failure.log)
        finally:
            stays = proven and keep_daemon and store == "directory"  # the bucket's server ends with this process
            if machine and not stays:
                stop_daemon(machine.daemon)
        if machine and stays:
            report.print_farewell(console, machine.daemon)
    if not proven:
        say(f"Journals, logs and checkpoints: {place}")
    return 0 if proven else 1


def fresh_directory(directory: Path) -> Path:
    """A new directory for a demo, with one for each run."""
    directory.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="demo-", dir=directory.resolve()))
    for run in (UNINTERRUPTED, RESUMED):
        (place / run).mkdir()
    return place


def play(stage: Stage) -> bool:
    """Train three times, compare, load, and print what was shown; True when every claim holds."""
    say, began = partial(stage.console.print, soft_wrap=True), time.monotonic()
    where = f"{stage.ranks} rank{'s' * (stage.ranks > 1)} ({stage.device})"
    say(f"[bold]2[/bold]  {stage.steps} steps on {where} without interruption, a save every {stage.save_every} steps")
    finish(stage, UNINTERRUPTED)
    say("[bold]3[/bold]  The same run again, to be killed")
    killed = train_and_kill(stage)
    say(f"   SIGKILL to the launcher and all ranks, {killed.processes} processes, at step {killed.step}")
    if stage.bucket is None:
        wait_for_commit(stage, killed.saved)
        say(f"   step {killed.saved}, staged before the kill, is committed")
        say("[bold]4[/bold]  The same command again")
    else:
        directory, count = stage.daemon.log.parent, stage.machine.lose()
        say(f"   SIGKILL to the daemon and the holder of its memory, {count} processes; {directory} is removed")
        stage.machine.start()
        say(f"[bold]4[/bold]  The same command again on an empty machine, {stage.daemon.log.parent}: it has the bucket only")
    finish(stage, RESUMED)
    whole, resumed = journals(stage, UNINTERRUPTED), journals(stage, RESUMED)
    say(f"   resumed from the checkpoint of step {resumed[0][-1].restored}, and ran to step {resumed[0][-1].step}")
    say("[bold]5[/bold]  Loading the last checkpoint with transformers, generating text")
    loaded = load_and_generate(stage)
    trained = [digests(stage, run) for run in (UNINTERRUPTED, RESUMED)]
    claims = [
        killed_claim(stage, killed, resumed),
        compare_losses(last(whole), [launches[0] for launches in resumed], "losses before the kill"),
        compare_losses(last(whole), last(resumed), "every loss after the resumption"),
        *compare_states(*[[rank["state"] for rank in ranks] for ranks in trained]),
        compare_weights(trained[1][0]["weights"], loaded["weights"]),
    ]
    report.print_losses(stage.console, stage.save_every, whole, resumed)
    report.print_claims(stage.console, claims)
    report.print_text(stage.console, loaded["text"])
    say(f"   {time.monotonic() - began:.0f} s in all")
    return all(claim.holds for claim in claims)


def command(stage: Stage, run: str) -> list[str]:
    numbers = ["--steps", str(stage.steps), "--save-every", str(stage.save_every)]
    places = ["--socket", str(stage.daemon.socket), "--directory", str(stage.place(run))]
    return trainer_command(stage.ranks, "--name", run, *numbers, "--device", stage.device, *places)


def finish(stage: Stage, run: str) -> None:
    """Train until the run is complete."""
    with LaunchedJob(command(stage, run), stage.place(run) / "trainer.log") as job:
        watch(stage, run, job, until=lambda launches: False)
        if job.poll() != 0:
            raise DemoFailed(f"the trainer of {run!r} ended with status {job.poll()}", job.log)


def train_and_kill(stage: Stage) -> Killed:
    """Train past the middle, wait until a save is staged and a few more steps are done, and kill everything.

    With a root in a bucket the save is also committed: what is staged only is lost with the machine.
    """
    middle = stage.steps // 2

    def is_time(launches: Sequence[LaunchRecord]) -> bool:
        staged = min(max(launch.staged, default=0) for launch in launches)
        if staged < middle or min(launch.step for launch in launches) < staged + 2:
            return False
        return stage.bucket is None or stage.is_committed(RESUMED, staged)

    with LaunchedJob(command(stage, RESUMED), stage.place(RESUMED) / "trainer.log") as job:
        watch(stage, RESUMED, job, until=is_time)
        if job.poll() is not None:
            raise DemoFailed("the trainer ended before it could be killed", job.log)
        processes = job.kill()
    launches = last(journals(stage, RESUMED))
    saved = middle if stage.bucket else min(max(launch.staged, default=0) for launch in launches)
    return Killed(saved, max(launch.step for launch in launches), processes)


def watch(stage: Stage, run: str, job: LaunchedJob, until: Callable[[Sequence[LaunchRecord]], bool]) -> None:
    """Show how far the run is, until it ends or `until` says so of all ranks' launches."""
    before, saved = len(journals(stage, run)[0]), None
    deadline = time.monotonic() + LAUNCH_S_MAX
    with stage.console.status(f"{run}: starting") as shown:
        while job.poll() is None:
            launches = journals(stage, run)
            if all(len(rank) > before for rank in launches):
                step = min(launch.step for launch in last(launches))
                shown.update(f"{run}: step {step} of {stage.steps}")
                if saved is not None and step - step % stage.save_every > saved:
                    stage.console.print(f"   step {step - step % stage.save_every} of {stage.steps}")
                saved = step - step % stage.save_every
                if until(last(launches)):
                    return
            if time.monotonic() > deadline:
                raise DemoFailed(f"the trainer of {run!r} did not end within {LAUNCH_S_MAX} s", job.log)
            time.sleep(POLL_S)


def wait_for_commit(stage: Stage, step: int) -> None:
    """Wait until the daemon has committed `step` without any living rank."""
    deadline = time.monotonic() + COMMIT_S_MAX
    while not stage.is_committed(RESUMED, step):
        if time.monotonic() > deadline:
            what = f"step {step} was staged before the kill, but is not committed after {COMMIT_S_MAX} s"
            raise DemoFailed(what, stage.daemon.log)
        time.sleep(POLL_S)


def killed_claim(stage: Stage, killed: Killed, resumed: Sequence[Sequence[LaunchRecord]]) -> Claim:
    """The resumed run began at or after the save that must not be lost, so it lost no more steps than that."""
    what = (
        f"a {'committed' if stage.bucket else 'staged'} save outlives its killed {'machine' if stage.bucket else 'trainer'}"
    )
    began = {launches[-1].restored for launches in resumed}
    holds = len(began) == 1 and killed.saved <= min(began) <= killed.step
    evidence = f"killed after step {killed.step}, resumed on all ranks from step {', '.join(map(str, sorted(began)))}"
    return Claim(what, holds and all(len(ranks) == 2 for ranks in resumed), evidence)


def load_and_generate(stage: Stage) -> dict[str, Any]:
    """A fresh process's result of `from_pretrained` for the last checkpoint: the weights' digests, and a text."""
    result, log = stage.directory / "generated.json", stage.directory / "generate.log"
    checkpoint = local_checkpoint(stage)
    arguments = [sys.executable, "-m", "holdfast.demo.generate", str(checkpoint), str(result)]
    with open(log, "ab") as output:
        ended = subprocess.run(
            arguments, stdout=output, stderr=output, env=child_environment(), timeout=LAUNCH_S_MAX, check=False
        )
    if ended.returncode != 0:
        raise DemoFailed(f"from_pretrained on {checkpoint} failed", log)
    loaded: dict[str, Any] = json.loads(result.read_text())
    return loaded


def local_checkpoint(stage: Stage) -> Path:
    """The directory of the last checkpoint: in the root, or a download from the bucket, as `holdfast export` makes one."""
    if stage.bucket is None:
        return Path(stage.daemon.root) / RESUMED / CHECKPOINTS / step_directory(stage.steps)
    target = stage.directory / "downloaded"
    with open_source(parse_target(f"{stage.bucket}/{RESUMED}@{stage.steps}"), None, None) as source:
        export(CheckpointReader.open(source), target, [], lambda count: None)
    return target


def journals(stage: Stage, run: str) -> list[list[LaunchRecord]]:
    paths = [stage.place(run) / f"rank-{rank}.jsonl" for rank in range(stage.ranks)]
    return [parse_journal(path.read_text()) if path.exists() else [] for path in paths]


def last(launches: Sequence[Sequence[LaunchRecord]]) -> list[LaunchRecord]:
    return [rank[-1] for rank in launches]


def digests(stage: Stage, run: str) -> list[dict[str, dict[str, str]]]:
    """The digests of each rank's final state, and of the whole weights."""
    return [json.loads((stage.place(run) / f"digests-{rank}.json").read_text()) for rank in range(stage.ranks)]
