"""A trainer that goes on whatever its daemon does, in a process of its own: AT DAEMON_PID POINT SAVES SECONDS, as one rank.

At step 3 it stops the daemon itself (SIGSTOP) at one of its own points, or says "ready" and leaves that to the test. Then it
saves on, half of its saves at once and the others spread over so many seconds, and reports how long each save() took, with
the fence before it. When it is told to "go", it saves once more, waits for the commit, and says which steps were committed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings

import torch

from holdfast import Checkpointer, SaveTicket, SaveWarning

SIZE = 2_000_003
FROZEN_AT = 3
WAIT_S = 100.0  # less than a test may take: a save whose other rank gave up can stay undecided


def main() -> None:
    at, daemon, point, saves, spread_s = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), float(sys.argv[5])
    warnings.simplefilter("ignore", SaveWarning)
    rank = int(os.environ["RANK"])
    weight = torch.full((SIZE,), float(rank))
    tickets: list[SaveTicket] = []
    with_us = Checkpointer("r", {"model": {f"w{rank}": weight}}, at=at, fenced=True)
    with_us.restore()

    def train() -> None:
        with_us.fence()
        weight.sub_(1.0)

    def save(step: int) -> float:
        began = time.monotonic()
        train()
        tickets.append(with_us.save(step))
        return time.monotonic() - began

    def freeze(here: str) -> None:
        if point == here and rank == 0:
            os.kill(daemon, signal.SIGSTOP)

    for step in range(1, FROZEN_AT):
        train()
        tickets.append(with_us.save(step, wait="durable"))  # which waits for a daemon that the machine holds up
    print("ready", flush=True)
    assert sys.stdin.readline() == "go\n"
    freeze("before lease")
    stalls = [save(FROZEN_AT)]
    freeze("in copy")
    began = time.monotonic()
    with_us.fence()
    stalls[0] += time.monotonic() - began
    if point == "sealed":
        tickets[-1].wait_staged(WAIT_S)
        freeze("sealed")
    if point == "idle":
        tickets[-1].result(WAIT_S)
        freeze("idle")
    print("saving", flush=True)
    assert sys.stdin.readline() == "go\n"
    later = saves - saves // 2
    for step in range(FROZEN_AT + 1, FROZEN_AT + 1 + saves):
        if step > FROZEN_AT + saves - later:
            time.sleep(spread_s / later)
        stalls.append(save(step))
    print("stalls", *(f"{stall:.3f}" for stall in stalls), flush=True)
    assert sys.stdin.readline() == "go\n"
    last = FROZEN_AT + 1 + saves
    for step in range(last, last + saves):  # until one goes through: the daemon has the rest of what it missed to do
        save(step)
        time.sleep(0.5)
    for ticket in tickets:
        ticket.wait_staged(WAIT_S)
    train()
    with_us.save(last + saves, wait="durable")
    print("committed", *(ticket.step for ticket in tickets if ticket.done and ticket.error is None), flush=True)
    with_us.close(wait=False)


if __name__ == "__main__":
    main()
