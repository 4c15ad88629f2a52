"""The demo's story: a run to compare with, a run that is killed, its resumption, the proof."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.markup import escape

from holdfast_formats.naming import CHECKPOINTS, COMMIT, step_directory

from . import report
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


class Stage(NamedTuple):
    """Where the demo runs and prints: its directory, its daemon, how many steps, on which device and how many ranks."""

    directory: Path
    daemon: DemoDaemon
    steps: int
    console: Console
    device: str = "cpu"
    ranks: int = RANKS

    @property
    def save_every(self) -> int:
        return max(self.steps // 6, 2)

    def place(self, run: str) -> Path:
        """Where a run's trainer writes its journals, digests and log."""
        return self.directory / run

    def checkpoint(self, run: str, step: int) -> Path:
        return self.daemon.root / run / CHECKPOINTS / step_directory(step)


class Killed(NamedTuple):
    """The second run's end: the last save staged on all ranks, the last step, and the number of killed processes."""

    staged: int
    step: int
    processes: int


def main(directory: Path, steps: int = STEPS, keep_daemon: bool = True, device: str = "cpu") -> int:
    """Play the demo on `device`, "cpu" or "cuda", in a fresh directory below `directory`; 0 when all claims hold, else 1."""
    console = Console(highlight=False)
    if steps < STEPS_MIN:
        console.print(f"[red]The demo needs at least {STEPS_MIN} steps.[/red]")
        return 2
    if device == "cuda" and not torch.cuda.is_available():
        console.print("[red]torch finds no CUDA device here.[/red]")
        return 2
    with leaving_in_order():
        return perform(fresh_directory(directory), steps, keep_daemon, console, device)


def perform(place: Path, steps: int, keep_daemon: bool, console: Console, device: str) -> int:
    """Start the daemon, train and compare, print failures, and leave only what is to stay."""
    daemon: DemoDaemon | None = None
    proven = False
    try:
        daemon = start_daemon(place)
        ranks = RANKS if device == "cpu" else min(RANKS, torch.cuda.device_count())
        stage = Stage(place, daemon, steps, console, device, ranks)
        console.print(
            f"[bold]1[/bold]  Daemon: process {daemon.process.pid}, {daemon.url}, checkpoints in {daemon.root}",
            soft_wrap=True,
        )
        proven = play(stage)
        if proven and keep_daemon:
            report.print_farewell(console, daemon)
    except DemoFailed as failure:
        console.print(f"[red bold]The demo failed:[/red bold] {escape(str(failure))}")
        report.print_log(console, failure.log)
    finally:
        if daemon and not (proven and keep_daemon):
            stop_daemon(daemon)
    if not proven:
        console.print(f"Journals, logs and checkpoints: {place}", soft_wrap=True)
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
    wait_for_commit(stage, killed.staged)
    say(f"   step {killed.staged}, staged before the kill, is committed")
    say("[bold]4[/bold]  The same command again")
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
    """Train past the middle, wait until a save is staged and a few more steps are done, and kill everything."""
    middle = stage.steps // 2

    def is_time(launches: Sequence[LaunchRecord]) -> bool:
        staged = min(max(launch.staged, default=0) for launch in launches)
        return staged >= middle and min(launch.step for launch in launches) >= staged + 2

    with LaunchedJob(command(stage, RESUMED), stage.place(RESUMED) / "trainer.log") as job:
        watch(stage, RESUMED, job, until=is_time)
        if job.poll() is not None:
            raise DemoFailed("the trainer ended before it could be killed", job.log)
        processes = job.kill()
    launches = last(journals(stage, RESUMED))
    staged = min(max(launch.staged, default=0) for launch in launches)
    return Killed(staged, max(launch.step for launch in launches), processes)


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
    while not (stage.checkpoint(RESUMED, step) / COMMIT).exists():
        if time.monotonic() > deadline:
            log = stage.directory / "daemon.log"
            raise DemoFailed(f"step {step} was staged before the kill, but is not committed after {COMMIT_S_MAX} s", log)
        time.sleep(POLL_S)


def killed_claim(stage: Stage, killed: Killed, resumed: Sequence[Sequence[LaunchRecord]]) -> Claim:
    """The resumed run began at or after the last save staged on all ranks, so it lost no more steps than that."""
    began = {launches[-1].restored for launches in resumed}
    holds = len(began) == 1 and killed.staged <= min(began) <= killed.step
    evidence = f"killed after step {killed.step}, resumed on all ranks from step {', '.join(map(str, sorted(began)))}"
    return Claim("a save outlives its killed trainer", holds and all(len(ranks) == 2 for ranks in resumed), evidence)


def load_and_generate(stage: Stage) -> dict[str, Any]:
    """A fresh process's result of `from_pretrained` for the last checkpoint: the weights' digests, and a text."""
    result, log = stage.directory / "generated.json", stage.directory / "generate.log"
    checkpoint = stage.checkpoint(RESUMED, stage.steps)
    arguments = [sys.executable, "-m", "holdfast.demo.generate", str(checkpoint), str(result)]
    with open(log, "ab") as output:
        ended = subprocess.run(
            arguments, stdout=output, stderr=output, env=child_environment(), timeout=LAUNCH_S_MAX, check=False
        )
    if ended.returncode != 0:
        raise DemoFailed(f"from_pretrained on {checkpoint} failed", log)
    loaded: dict[str, Any] = json.loads(result.read_text())
    return loaded


def journals(stage: Stage, run: str) -> list[list[LaunchRecord]]:
    paths = [stage.place(run) / f"rank-{rank}.jsonl" for rank in range(stage.ranks)]
    return [parse_journal(path.read_text()) if path.exists() else [] for path in paths]


def last(launches: Sequence[Sequence[LaunchRecord]]) -> list[LaunchRecord]:
    return [rank[-1] for rank in launches]


def digests(stage: Stage, run: str) -> list[dict[str, dict[str, str]]]:
    """The digests of each rank's final state, and of the whole weights."""
    return [json.loads((stage.place(run) / f"digests-{rank}.json").read_text()) for rank in range(stage.ranks)]
