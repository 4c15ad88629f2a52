"""Shared memory, stalls and restores of ranks that hold the same state, as those of DDP: staged once, or by each rank.

python -m benchmarks.replicas [--ranks 2] [--mib 1024] [--saves 12] [--pause 3] [--rounds 3] [--directory DIR] [--json PATH]

The two ways take turns: in `once` one rank stages each tensor from the second save on; in `each` every rank stages
everything, as in the first save. Every save changes every tensor, and is durable before the next one begins. Of each save
after the second: the time in `save()` and in a fence right after it, and until it is durable. After the last one: the memory
of the daemon's segments, the PSS of all processes above what the ranks had before, and a restore by the next launch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.processes import pss, tree
from holdfast import Checkpointer
from holdfast.stage import replica_claims
from tests.daemons import RunningDaemon, running, shared_memory

WAYS = ("once", "each")
MIB = 2**20
LAYERS = 32  # each with a weight and its two moments
SETTLED = 2  # saves that are not counted: the first one, and the one that gives memory back


class Rank:
    """One rank of a launch, which does what its parent says."""

    def __init__(self, state_bytes: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        width = state_bytes // LAYERS // 3 // 4 // 1024
        model = nn.Sequential(*(nn.Linear(1024, width, bias=False) for _ in range(LAYERS)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        self.state = {"model": model, "optim": optimizer}
        moments = [one[name] for one in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        self.tensors = [parameter.detach() for parameter in model.parameters()] + moments
        self.bytes = sum(tensor.nbytes for tensor in self.tensors)

    def save(self, checkpointer: Checkpointer, step: int) -> dict[str, float]:
        for tensor in self.tensors:
            tensor.add_(0.5)
        began = time.perf_counter()
        ticket = checkpointer.save(step)
        checkpointer.fence()
        stall = time.perf_counter() - began
        ticket.result()
        return {"stall_s": stall, "durable_s": time.perf_counter() - began}

    def restore(self, checkpointer: Checkpointer) -> dict[str, Any]:
        began = time.perf_counter()
        checkpointer.restore()
        took = time.perf_counter() - began
        report = checkpointer.last_restore
        return {"restore_s": took, "source": "nowhere" if report is None else report.source}


def rank(at: str, run: str, way: str, state_bytes: int) -> None:
    """The body of a rank's process: `save N`, `restore` and `before` on stdin, a JSON line after each."""
    if way == "each":
        replica_claims.Claims.is_spared = lambda self, leaf: False  # type: ignore[method-assign]
    this = Rank(state_bytes)
    print(json.dumps({"bytes": this.bytes, "pss": pss([os.getpid()])}), flush=True)
    checkpointer = Checkpointer(run, this.state, at=at, fenced=True, keep_last=2)
    for line in sys.stdin:
        what, _, step = line.strip().partition(" ")
        found = this.save(checkpointer, int(step)) if what == "save" else this.restore(checkpointer)
        print(json.dumps(found), flush=True)


class Launch(NamedTuple):
    """The processes of a launch, and the PSS that they had before they used Holdfast."""

    processes: list[subprocess.Popen[str]]
    state_bytes: int
    pss_before: int

    @classmethod
    def begin(cls, daemon: RunningDaemon, way: str, ranks: int, state_bytes: int, number: int) -> Launch:
        processes = []
        for position in range(ranks):
            about = {"RANK": position, "WORLD_SIZE": ranks, "HOLDFAST_LAUNCH": f"{way}-{number}"}
            words = [sys.executable, "-m", "benchmarks.replicas", "--as-rank", daemon.socket, way, state_bytes]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            environment = {**os.environ, **{name: str(value) for name, value in about.items()}}
            processes.append(subprocess.Popen(list(map(str, words)), env=environment, **pipes))  # type: ignore[call-overload]
        said = [json.loads(process.stdout.readline()) for process in processes]
        return cls(processes, said[0]["bytes"], sum(one["pss"] for one in said))

    def tell(self, line: str) -> list[dict[str, Any]]:
        """Every rank's answer."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
        return [json.loads(process.stdout.readline()) for process in self.processes if process.stdout is not None]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


def lap(directory: Path, way: str, ranks: int, state_bytes: int, saves: int, pause_s: float) -> dict[str, Any]:
    """One launch of saves, and the restore of the next one."""
    found: dict[str, Any] = defaultdict(list)
    with running(directory / f"root-{way}") as daemon:
        daemon_before = pss(tree(daemon.process.pid))
        launch = Launch.begin(daemon, way, ranks, state_bytes, 1)
        for step in range(1, saves + 1):
            said = launch.tell(f"save {step}")
            time.sleep(pause_s)
            for name in ("stall_s", "durable_s"):
                found[name if step > SETTLED else f"{name}, save {step}"].append(max(one[name] for one in said))
        processes = [pid for process in launch.processes for pid in tree(process.pid)]
        all_pss = pss([*processes, *tree(daemon.process.pid)])
        found["segments / state"] = shared_memory(daemon) / launch.state_bytes
        found["PSS above the state / state"] = (all_pss - launch.pss_before - daemon_before) / launch.state_bytes
        launch.kill()
        again = Launch.begin(daemon, way, ranks, state_bytes, 2)
        said = again.tell("restore")
        found["restore_s"] = max(one["restore_s"] for one in said)
        found["source"] = ",".join(sorted({one["source"] for one in said}))
        again.kill()
    return {name: statistics.median(value) if isinstance(value, list) else value for name, value in found.items()}


def measure(given: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Laps by way, in turn."""
    laps: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for number in range(given.rounds):
        for way in WAYS[:: 1 if number % 2 else -1]:
            with tempfile.TemporaryDirectory(dir=given.directory) as place:
                laps[way].append(lap(Path(place), way, given.ranks, given.mib * MIB, given.saves, given.pause))
                print(way, json.dumps(laps[way][-1]), file=sys.stderr, flush=True)
    return laps


def show(laps: dict[str, list[dict[str, Any]]]) -> list[str]:
    """A table of medians, with the least and the greatest."""
    names = list(laps["once"][0])
    lines = ["| | " + " | ".join(WAYS) + " |", "|---" * (len(WAYS) + 1) + "|"]
    for name in names:
        cells = []
        for way in WAYS:
            values = [found[name] for found in laps[way]]
            if isinstance(values[0], str):
                cells.append(", ".join(sorted(set(values))))
            else:
                cells.append(f"{statistics.median(values):.3f} ({min(values):.3f}–{max(values):.3f})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--saves", type=int, default=12)
    parser.add_argument("--pause", type=float, default=3.0, help="seconds after each save")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--as-rank", nargs=3, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_rank is not None:
        at, way, state_bytes = given.as_rank
        rank(at, "ddp", way, int(state_bytes))
        return
    laps = measure(given)
    if given.json is not None:
        given.json.write_text(json.dumps(laps, indent=1))
    print("\n".join(show(laps)))


if __name__ == "__main__":
    main()
