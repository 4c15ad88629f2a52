"""What a drain to a bucket costs the trainer beside it: `python -m benchmarks.drains [--rounds 9] [--mib 256]`.

The same training saves to a daemon with a local root alone, and to one that also drains each checkpoint to a bucket of
SeaweedFS here. The rounds alternate. Saves follow each other so closely that a drain nearly always runs. The trainer's
thread has its own core; the daemon and the server share the others. The server has the scheduling class SCHED_IDLE, because
in life it runs on another machine.

Prints medians over the rounds with the least and the most, the ratios of the pairs, and how many checkpoints had been
drained by the end of the last step. The exit status is 1 if the bar is missed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import torch

from holdfast import Checkpointer
from tests.daemons import running
from tests.kit.objects import BucketServer, fresh_bucket, running_seaweedfs

from .peers.holdfast import entries
from .processes import Cores, tree
from .state import State, allocate, fill, llama
from .training import Work

RUN, TIER = "drains", "bucket"
BAR = 1.02
PRODUCTS = 2
SEED = 11
WAIT_S = 600.0


class Lap(NamedTuple):
    """What one round cost the trainer, in seconds: medians of the saves, and the mean of its steps."""

    save: float
    fence: float
    step: float


class Wanted(NamedTuple):
    """How often is measured, and what: saves a round and steps from one save to the next."""

    rounds: int
    saves: int
    steps: int


def train(checkpointer: Checkpointer, work: Work, wanted: Wanted) -> Lap:
    """The first step after a save has the fence, whose wait counts for itself."""
    saving, fencing, stepping = [], [], []

    def fence() -> None:
        began = time.perf_counter()
        checkpointer.fence()
        fencing.append(time.perf_counter() - began)

    for number in range(1, wanted.saves + 1):
        began = time.perf_counter()
        checkpointer.save(1 + number)
        saving.append(time.perf_counter() - began)
        began = time.perf_counter()
        work.step(fence)
        stepping.append(time.perf_counter() - began - fencing[-1])
        stepping += work.timed(wanted.steps - 1)
    return Lap(median(saving), median(fencing), mean(stepping))


def one_round(
    root: Path, flags: Sequence[str], state: State, wanted: Wanted, server: int, drained: Callable[[], int]
) -> tuple[Lap, int]:
    """A daemon of its own, one save and some steps that are not measured, and the round; and how many were drained then."""
    work = Work(state, PRODUCTS)
    with (
        running(root, "--keep", "3", *flags) as daemon,
        Checkpointer(RUN, entries(state), at=daemon.socket, fenced=True) as checkpointer,
    ):
        checkpointer.prepare(wait=True)
        ticket = checkpointer.save(1)
        checkpointer.fence()
        ticket.result(WAIT_S, tier=TIER if flags else None)
        cores = Cores(0, 1, (daemon.process.pid, server))
        cores.divide()
        work.timed(5)
        lap = train(checkpointer, work, wanted)
        copied = drained() - 1 if flags else 0
        cores.free()
    return lap, copied


def measure(directory: Path, server: BucketServer, pid: int, state: State, wanted: Wanted) -> list[tuple[Lap, Lap, int]]:
    """A lap with a local root alone, one with a drain, and what was drained, in turns."""
    pairs = []
    for number in range(wanted.rounds):
        laps: dict[str, tuple[Lap, int]] = {}
        with fresh_bucket(server) as bucket:
            ways = {"local": (), "drain": ("--tier", f"{TIER}={bucket.url}/tier")}
            for way in sorted(ways, reverse=number % 2 == 0):
                root = directory / f"{way}-{number}"
                commits = lambda: sum(1 for key in bucket.sizes("tier/") if "/commits/" in key)  # noqa: E731
                laps[way] = one_round(root, ways[way], state, wanted, pid, commits)
        pairs.append((laps["local"][0], *laps["drain"]))
        print(f"round {number + 1}: " + "  ".join(f"{way} {lap[0]}" for way, lap in laps.items()), flush=True)
    return pairs


def spread(values: Sequence[float], form: str = "{:.4f}") -> str:
    return " ".join(form.format(value) for value in (median(values), min(values), max(values)))


def show(pairs: Sequence[tuple[Lap, Lap, int]], wanted: Wanted) -> list[str]:
    """Print the table; returns what is over the bar."""
    missed = []
    print(
        "| seconds: median least most | local root | with a drain | of the medians | of the pairs |\n|---|---|---|---|---|"
    )
    rows = {name: ([getattr(a, name) for a, _, _ in pairs], [getattr(b, name) for _, b, _ in pairs]) for name in Lap._fields}
    rows["stall"] = ([a.save + a.fence for a, _, _ in pairs], [b.save + b.fence for _, b, _ in pairs])
    for name, (local, drain) in rows.items():
        ratios = spread([b / a for a, b in zip(local, drain, strict=True)], "{:.3f}")
        times = median(drain) / median(local)
        print(f"| {name} | {spread(local)} | {spread(drain)} | {times:.3f} | {ratios} |")
        if name in ("stall", "step") and times > BAR:
            missed.append(f"{name} is {times:.3f} times that with a local root")
    print(f"drained by the end of the last step, of {wanted.saves}: {spread([n for _, _, n in pairs], '{:.0f}')}")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mib", type=int, default=256, help="size of the state")
    parser.add_argument("--saves", type=int, default=5, help="in a round")
    parser.add_argument("--steps", type=int, default=60, help="from one save to the next")
    parser.add_argument("--directory", type=Path, help="of root and server (default: the system's temporary one)")
    options = parser.parse_args()
    wanted = Wanted(options.rounds, options.saves, options.steps)
    torch.set_num_threads(1)
    state = allocate(llama(options.mib * 2**20), 0, 1, 1)
    fill(state, SEED)
    with tempfile.TemporaryDirectory(dir=options.directory) as place, running_seaweedfs(Path(place)) as server:
        os.environ.update(server.environment())
        pid = idle_server()
        pairs = measure(Path(place), server, pid, state, wanted)
    missed = show(pairs, wanted)
    print("\n".join(f"missed: {reason}" for reason in missed) or "the bar is reached")
    return 1 if missed else 0


def idle_server() -> int:
    """Give the threads of the SeaweedFS that this process runs the class SCHED_IDLE; returns its process."""
    (pid,) = [one for one in tree(os.getpid()) if "weed" in Path(f"/proc/{one}/cmdline").read_text().split("\0")[0]]
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))
    return pid


if __name__ == "__main__":
    sys.exit(main())
