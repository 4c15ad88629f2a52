"""Saves while all cores are busy: `python -m benchmarks.busy [--mib 1024] [--rounds 7]`.

A rank saves every few seconds, alone on the machine, and beside one process for each core that computes without a pause at
normal priority, as data loaders do. In turns, it trains beside them without saves. Prints how long a save takes until it is
durable, what steps and small operations of Python cost, and their ratios. The exit status is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import torch

from holdfast import Checkpointer
from holdfast.tickets import SaveTicket
from tests.daemons import running

from .drains import spread
from .peers.holdfast import entries
from .state import State, allocate, fill, llama
from .training import Watch, Work

RUN = "busy"
DURABLE_BAR, STEP_BAR, SMALL_BAR = 1.5, 1.05, 1.05
SEED = 12
PRODUCTS = 2
SMALL = 20_000  # small operations after each step, about 1 ms
WAIT_S = 600.0
BURN = "import os\nwhile True:\n    for _ in range(100000): pass\n    if os.getppid() == 1: break"


class Lap(NamedTuple):
    """Seconds: until a save was durable (0 without saves), one step, and its small operations."""

    durable: float
    save: float
    step: float
    small: float


@contextmanager
def burning(processes: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many processes that compute."""
    burners = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(processes)]
    try:
        yield burners
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def small_operations() -> float:
    began = time.perf_counter()
    counts: dict[int, int] = {}
    for number in range(SMALL):
        counts[number & 255] = counts.get(number & 255, 0) + 1
    return time.perf_counter() - began


def train(checkpointer: Checkpointer, work: Work, seconds: float, saves: Sequence[int]) -> Lap:
    """Steps for `seconds` from each save on; without `saves`, as long once."""
    durable, saving, steps, small = [], [], [], []
    for number in saves or (0,):
        began = time.perf_counter()
        watch = None
        if number:
            ticket: SaveTicket = checkpointer.save(number)
            saving.append(time.perf_counter() - began)
            watch = Watch(lambda ticket=ticket: ticket.result(WAIT_S), began)  # type: ignore[misc]
        first = True
        while time.perf_counter() - began < seconds or (watch is not None and not watch.ended):
            at = time.perf_counter()
            work.step(checkpointer.fence if first and number else None)
            steps.append(time.perf_counter() - at)
            small.append(small_operations())
            first = False
        if watch is not None:
            durable.append(watch.seconds())
    return Lap(median(durable or [0.0]), median(saving or [0.0]), mean(steps), mean(small))


def idle(checkpointer: Checkpointer, saves: Sequence[int]) -> Lap:
    """Saves while nothing computes."""
    durable = []
    for number in saves:
        began = time.perf_counter()
        ticket = checkpointer.save(number)
        checkpointer.fence()
        ticket.result(WAIT_S)
        durable.append(time.perf_counter() - began)
        time.sleep(1.0)  # the read-back ends meanwhile
    return Lap(median(durable), 0.0, 0.0, 0.0)


def measure(directory: Path, state: State, rounds: int, saves: int, seconds: float) -> dict[str, list[Lap]]:
    laps: dict[str, list[Lap]] = {"idle": [], "alone": [], "busy": []}
    work = Work(state, PRODUCTS)
    with (
        running(directory / "root", "--keep", "2") as daemon,
        Checkpointer(RUN, entries(state), at=daemon.socket, fenced=True) as checkpointer,
    ):
        checkpointer.prepare(wait=True)
        idle(checkpointer, [1])
        step = 2
        for number in range(rounds):
            for way in [*laps][number % 3 :] + [*laps][: number % 3]:
                numbers = range(step, step + saves)
                with burning(0 if way == "idle" else len(os.sched_getaffinity(0))):
                    if way == "idle":
                        laps[way].append(idle(checkpointer, numbers))
                    else:
                        laps[way].append(train(checkpointer, work, seconds, numbers if way == "busy" else ()))
                step += saves
            print(f"round {number + 1}: " + "  ".join(f"{way} {laps[way][-1]}" for way in laps), flush=True)
    return laps


def show(laps: dict[str, list[Lap]]) -> list[str]:
    """Print the table; returns the bars that are missed."""
    rows = {
        "durable": ([one.durable for one in laps["idle"]], [one.durable for one in laps["busy"]], DURABLE_BAR),
        "step": ([one.step for one in laps["alone"]], [one.step for one in laps["busy"]], STEP_BAR),
        "small operations": ([one.small for one in laps["alone"]], [one.small for one in laps["busy"]], SMALL_BAR),
    }
    missed = []
    print("| seconds: median least most | without | with | ratio | bar |\n|---|---|---|---|---|")
    for name, (without, with_, bar) in rows.items():
        ratio = median(with_) / median(without)
        print(f"| {name} | {spread(without)} | {spread(with_)} | {ratio:.3f} | {bar} |")
        if ratio > bar:
            missed.append(f"{name}: {ratio:.3f}, for {bar}")
    print(f"save(): {spread([one.save for one in laps['busy']])}")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--saves", type=int, default=2, help="in a round")
    parser.add_argument("--seconds", type=float, default=10.0, help="from one save to the next")
    parser.add_argument("--directory", type=Path, help="of the root (default: the system's temporary one)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    state = allocate(llama(options.mib * 2**20), 0, 1, 1)
    fill(state, SEED)
    with tempfile.TemporaryDirectory(dir=options.directory) as place:
        missed = show(measure(Path(place), state, options.rounds, options.saves, options.seconds))
    print("\n".join(f"missed: {reason}" for reason in missed) or "all bars are met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
