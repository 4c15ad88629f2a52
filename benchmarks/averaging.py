"""What an average costs the training: step times with `ema=` and without, in turns, on one daemon and one machine.

python -m benchmarks.averaging [--mib 512] [--batch 64] [--every 10] [--steps 60] [--rounds 5] [--json PATH]

A step is forward, backward and an optimizer's step of plain F32 weights, all of which are averaged. Each round trains with
the average and without it, on fresh models. An update is copied and folded during the first steps behind it: the mean of all
steps is held against that of the later half between two updates, of the same seconds of the same machine, and the same
excess of the run without an average is taken off. Whole runs differ by more than the average costs; their means are told
besides. So is the load, because the daemon's thread gives way to everything else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast import Checkpointer, Ema
from tests.daemons import running, wait_until

BAR = 0.01
WIDTH = 2048
WARM_UP_UPDATES = 2  # the first one makes memory


def train(socket: Path, run: str, ema: Ema | None, arguments: argparse.Namespace) -> dict[str, Any]:
    """The seconds of each step, and what became of the updates."""
    torch.manual_seed(0)
    layers = max(arguments.mib * 2**20 // (4 * WIDTH * WIDTH), 1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    optim = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    batch = torch.randn(arguments.batch, WIDTH)
    warm_up = WARM_UP_UPDATES * arguments.every
    seconds = []
    with Checkpointer(run, {"model": model, "optim": optim}, at=socket, ema=ema) as checkpointer:
        for step in range(warm_up + arguments.steps):
            began = time.perf_counter()
            optim.zero_grad()
            model(batch).square().mean().backward()
            optim.step()
            if step >= warm_up:
                seconds.append(time.perf_counter() - began)
        if ema is None:
            return {"seconds": seconds}
        wait_until(lambda: checkpointer.ema.ready, 300)
        return {"seconds": seconds, "n": checkpointer.ema.n, "due": (warm_up + arguments.steps) // ema.every}


def excess(seconds: list[float], every: int) -> float:
    """By what part the mean of all steps is above that of the later half between updates, each begun by the last step."""
    later = [taken for number, taken in enumerate(seconds) if every // 2 <= number % every < every - 1]
    return statistics.mean(seconds) / statistics.mean(later) - 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.averaging")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    ratios, folded, due = [], 0, 0
    with tempfile.TemporaryDirectory() as directory, running(Path(directory) / "root") as daemon:
        for number in range(arguments.rounds):
            ema = Ema(decay=0.999, of="model", every=arguments.every)
            pair = [
                train(daemon.socket, f"with-{number}", ema, arguments),
                train(daemon.socket, f"bare-{number}", None, arguments),
            ]
            means = [statistics.mean(one["seconds"]) for one in pair]
            folded, due = folded + pair[0]["n"], due + pair[0]["due"]
            excesses = [excess(one["seconds"], arguments.every) for one in pair]
            ratios.append(excesses[0] - excesses[1])
            print(
                f"round {number}: {means[0] * 1e3:.1f} ms a step with the average, {means[1] * 1e3:.1f} without; behind "
                f"updates {excesses[0]:+.2%} and {excesses[1]:+.2%}",
                flush=True,
            )
    cost = statistics.median(ratios)
    found = {"cost": cost, "bar": BAR, "updates": folded, "due": due, "load": os.getloadavg()[0], "cores": os.cpu_count()}
    print(
        f"the average costs {cost:+.2%} of a step (bar {BAR:.0%}); {folded} of {due} updates were folded; "
        f"load {found['load']:.1f} on {found['cores']} cores"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    return 0 if cost <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
