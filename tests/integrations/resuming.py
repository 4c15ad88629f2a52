"""Kills a training script again and again, and compares everything that it did with a run that nobody disturbed (E1).

A script is a module that trains to its end from wherever the last save was, and keeps a `recording.Record`. It is started
with the arguments of the test and `--work DIRECTORY`, where it keeps everything.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests.daemons import free_port
from tests.forked import Forked, Kind
from tests.integrations.environments import TOP
from tests.integrations.recording import DIE_AT, RECORD

START_S = 900.0  # what a start may take before its first line, on a machine that is busy
STEPS_PAST = 5  # a start is killed after one to that many steps that no start had reached, or more in a long training

KILLED = (-signal.SIGKILL, 256 - signal.SIGKILL)  # the status of a killed rank, and that of a launcher that has one


class Outcome(NamedTuple):
    """What a script did: each start's first step, each step's line, and the last line."""

    began: list[int]
    steps: dict[int, list[dict[str, Any]]]
    ends: list[dict[str, Any]]


def outcome(record: Path) -> Outcome:
    """What the record of rank 0 says; a line that a kill cut off is left out."""
    found = Outcome([], {}, [])
    for text in record.read_text().splitlines() if record.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if "began" in line:
            found.began.append(line["began"])
        elif "step" in line:
            found.steps.setdefault(line["step"], []).append(line)
        else:
            found.ends.append(line)
    return found


Rank = subprocess.Popen[bytes] | Forked


def start(
    module: str, arguments: Sequence[str], work: Path, world: int, die_at: int = -1, kind: Kind | None = None
) -> list[Rank]:
    """The ranks of a script, in one process group each, with the environment that torchrun makes for a new launch.

    A rank that is alone is started as a plain program is, without that environment. With a `kind` they are forks of a
    process that has imported what takes most of a start.
    """
    work.mkdir(parents=True, exist_ok=True)
    about = dict(os.environ)
    if world > 1:
        about |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
        about |= {"LOCAL_WORLD_SIZE": str(world), "TORCHELASTIC_RUN_ID": uuid.uuid4().hex, "TORCHELASTIC_RESTART_COUNT": "0"}
    about |= settings(die_at)
    command = ["-m", module, "--work", str(work), *arguments]
    ranks: list[Rank] = []
    for rank in range(world):
        mine = about | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {})
        mine |= {RECORD: str(work / f"record-{rank}.jsonl")}
        with (work / f"output-{rank}.txt").open("ab") as output:
            if kind is not None:
                ranks.append(Forked(command, mine, output=output.fileno(), kind=kind, session=True))
                continue
            own = [sys.executable, *command]
            ranks.append(subprocess.Popen(own, env=mine, cwd=TOP, stdout=output, stderr=output, start_new_session=True))
    return ranks


def settings(die_at: int) -> dict[str, str]:
    """What else the environment of a script says."""
    return {DIE_AT: str(die_at), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(TOP)}


def end(ranks: Sequence[Rank]) -> None:
    """Kill whatever is left of the ranks, with their data loader's workers."""
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()


Start = Callable[[str, Sequence[str], Path, int, int], list[Rank]]  # as `start`, by some launcher


def completed(module: str, arguments: Sequence[str], work: Path, world: int = 1, by: Start = start) -> Outcome:
    """Run a script to its end, undisturbed."""
    ranks = by(module, arguments, work, world, -1)
    try:
        for rank in ranks:
            rank.wait(timeout=START_S * 2)
        assert all(rank.returncode == 0 for rank in ranks), _output(work)
    finally:
        end(ranks)
    return outcome(work / "record-0.jsonl")


def killed(
    module: str, arguments: Sequence[str], work: Path, last: int, kills: int, seed: int, world: int = 1, by: Start = start
) -> Outcome:
    """Run a script to its end, killed so many times: at a step's end by itself, or at any moment from outside. The kills are
    spread over the training, and the last one comes late, so that something has been saved, however few there are. No start
    outruns its kill: it dies by itself at the last step, before a script that notes steps before it saves them has ended.
    """
    chance = random.Random(seed)
    past = max(STEPS_PAST, 3 * last // (2 * max(kills, 1)))
    record = work / "record-0.jsonl"
    for number in range(kills):
        seen = max(outcome(record).steps, default=0)
        target = min(seen + chance.randint(1, past), last)
        if seen >= last:  # all steps were seen once: the rest are killed on the way through them once more
            target = chance.randint(max(1, last - STEPS_PAST), last)
        by_itself = chance.random() < 0.5
        if number == kills - 1 and seen < last:
            target, by_itself = max(target, last - chance.randrange(STEPS_PAST)), True
        lines = len(_steps(record))
        ranks = by(module, arguments, work, world, target if by_itself else last)
        try:
            _await_kill(ranks, record, lines, chance.randint(1, past) if not by_itself else 10**9, work)
            if not by_itself:
                time.sleep(chance.uniform(0, 0.3))
        finally:
            end(ranks)
    return completed(module, arguments, work, world, by)


def assert_equal(whole: Outcome, other: Outcome) -> None:
    """Every step of every start, and the end, are those of the run that nobody disturbed, bit by bit."""
    assert whole.ends and other.ends, "a run did not come to its end"
    for step, lines in sorted(other.steps.items()):
        for line in lines:
            assert line == whole.steps[step][0], f"step {step}: {line}, undisturbed {whole.steps[step][0]}"
    assert set(other.steps) == set(whole.steps)
    assert other.ends[-1] == whole.ends[0], _difference(whole.ends[0], other.ends[-1])


def _await_kill(ranks: Sequence[Rank], record: Path, lines: int, steps: int, work: Path) -> None:
    """Return when a rank has killed itself or ended, or when so many more steps were recorded."""
    limit = time.monotonic() + START_S
    while time.monotonic() < limit:
        codes = [rank.poll() for rank in ranks]
        if any(code in KILLED for code in codes) or len(_steps(record)) >= lines + steps:
            return  # the other ranks may have failed because of it
        assert all(code in (None, 0) for code in codes), _output(work)
        if 0 in codes:
            return
        time.sleep(0.01)
    raise AssertionError(f"nothing came of a start within {START_S} s: {_output(work)}")


def _steps(record: Path) -> list[str]:
    return [line for line in record.read_text().splitlines() if '"step"' in line] if record.exists() else []


def _difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    names = [name for name in one["end"] if other["end"].get(name) != one["end"][name]]
    return f"different at the end: {names[:10]} of {len(one['end'])}; values {one['values']} and {other['values']}"


def _output(work: Path) -> str:
    return "\n".join(f"{path.name}:\n{path.read_text()[-4000:]}" for path in sorted(work.glob("output-*.txt")))
