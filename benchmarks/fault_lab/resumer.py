"""A new process that resumes, and reports what it got:

    python -m benchmarks.fault_lab.resumer TASK.json

Where resuming fails it asks for earlier steps by name, newest first.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.state import State, digests

from .events import chained
from .peers import PEERS, Peer
from .trainer import Task, read_task, set_up

REPORT = "report.json"


def resume(task: Task) -> dict[str, Any]:
    state, peer = set_up(task)
    error = "not asked"
    if task.resumes:
        try:
            return {"loaded": {"step": peer.resume(), "digests": digests(state)}, "error": ""}
        except BaseException as raised:  # DCP's errors are no `Exception`
            traceback.print_exc()
            error = chained(raised)
    return {"loaded": by_name(task, state, peer), "error": error}


def by_name(task: Task, state: State, peer: Peer) -> dict[str, Any] | None:
    for step in task.asked_for:
        try:
            peer.load(step)
        except BaseException:
            traceback.print_exc()
            continue
        return {"step": step, "digests": digests(state)}
    return None


def main() -> None:
    task = read_task(Path(sys.argv[1]))
    try:
        found = resume(task)
    except BaseException as raised:
        traceback.print_exc()
        found = {"loaded": None, "error": chained(raised)}
    found["versions"] = {name: version(name) for name in PEERS[task.peer].distributions}
    (Path(task.folder) / REPORT).write_text(json.dumps(found))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # peers leave threads behind


if __name__ == "__main__":
    main()
