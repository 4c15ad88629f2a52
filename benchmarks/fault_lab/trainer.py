"""A trainer that saves a few steps, in a process of its own so that it can be killed:

    python -m benchmarks.fault_lab.trainer TASK.json

It says what it does line by line (`events.py`). The digests of a step stand in a file before the step is saved.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.processes import marked
from benchmarks.state import State, allocate, digests, fill, llama

from .events import BEGIN, DURABLE, END, FAILED, READY, SAVED, chained, say
from .peers import PEERS, Peer, open_peer

MARK = "FAULT_LAB_JOB"  # in the environment of all that belongs to a job: its folder
TRAINER, EVERYTHING = "trainer", "everything"


class Task(NamedTuple):
    """What the lab asks of a trainer, and of the process that resumes."""

    peer: str
    directory: str
    folder: str  # for digests and reports
    state_bytes: int
    seed: int = 0
    steps: tuple[int, ...] = ()
    dies: str = ""  # right after the last save() has returned: TRAINER alone, or EVERYTHING of the job
    pauses: bool = False  # before the last save, until a line comes
    asked_for: tuple[int, ...] = ()  # steps to be loaded by name where resuming fails
    resumes: bool = True  # False: only by name


def digests_file(folder: Path, step: int) -> Path:
    return folder / f"digests-{step}.json"


def read_task(path: Path) -> Task:
    given: dict[str, Any] = json.loads(path.read_text())
    given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return Task(**given)


def set_up(task: Task) -> tuple[State, Peer]:
    """A process group of one, live tensors, and the peer over them."""
    faulthandler.enable()
    torch.set_num_threads(1)
    rendezvous = Path(task.folder) / f"store-{os.getpid()}"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    state = allocate(llama(task.state_bytes), 0, 1, 1)
    return state, open_peer(PEERS[task.peer], Path(task.directory), state)


def train(task: Task) -> None:
    state, peer = set_up(task)
    say(READY)
    for step in task.steps:
        last = step == task.steps[-1]
        fill(state, task.seed * 100 + step)
        digests_file(Path(task.folder), step).write_text(json.dumps(digests(state)))
        if task.pauses and last:
            say(READY)
            sys.stdin.readline()
        victims = victims_of(task) if last else None
        if not _save(peer, step, victims):
            break
    try:
        peer.close()
    except BaseException as error:
        say(FAILED, where="close()", error=chained(error))
    say(END)


def victims_of(task: Task) -> list[int] | None:
    """Who dies once the last save has returned, this process last; None where nobody does."""
    others = [pid for pid in marked(MARK, task.folder) if pid != os.getpid()]
    return {"": None, TRAINER: [os.getpid()], EVERYTHING: [*others, os.getpid()]}[task.dies]


def _save(peer: Peer, step: int, victims: list[int] | None) -> bool:
    """Whether it succeeded, as far as the trainer is told."""
    where = "save()"
    began = time.perf_counter()
    say(BEGIN, step=step)
    try:
        peer.save(step)
        for victim in victims or ():
            os.kill(victim, signal.SIGKILL)
        say(SAVED, step=step)
        where = "waiting for it"
        peer.wait()
    except BaseException as error:  # DCP's errors are no `Exception`
        traceback.print_exc()
        say(FAILED, where=where, error=chained(error))
        return False
    say(DURABLE, step=step, seconds=time.perf_counter() - began)
    return True


def main() -> None:
    status = 0
    try:
        train(read_task(Path(sys.argv[1])))
    except BaseException as error:
        traceback.print_exc()
        say(FAILED, where="setting up", error=chained(error))
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # peers leave threads behind


if __name__ == "__main__":
    main()
