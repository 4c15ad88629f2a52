"""Saves every step against a disk that is slower than the saves: does training wait, is every drop known, how old is the
last commit? Exits with 1 where one of the bars is missed.

python -m benchmarks.slow_disk [--steps 200] [--mib 64] [--bytes-per-second 100000000] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
import urllib.request
import warnings
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from holdfast import Api, Checkpointer, SaveWarning
from holdfast.tickets import SaveTicket
from holdfast_formats.errors import GenerationDropped
from holdfast_formats.rest import bodies
from tests.daemons import RunningDaemon, running

RUN = "slow-disk"
LAYERS, BATCH = 8, 16
BYTES_A_PARAMETER = 12  # a float32 weight and two moments


class Trainer:
    """A stack of square layers under AdamW: parameters and moments of `size` bytes in all."""

    def __init__(self, size: int) -> None:
        width = int((size / BYTES_A_PARAMETER / LAYERS) ** 0.5)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
        self.optim = torch.optim.AdamW(self.model.parameters())
        self._data = torch.randn(BATCH, width)
        self.backward()
        self.optim.step()

    def backward(self) -> None:
        self.optim.zero_grad()
        self.model(self._data).square().mean().backward()


class Lap(NamedTuple):
    """What one step cost, in seconds: in `save()`, before the optimizer might step, in all."""

    save: float
    fence: float
    step: float


def train(trainer: Trainer, checkpointer: Checkpointer, steps: int) -> tuple[list[Lap], list[SaveTicket]]:
    """Every step computes, waits for what the last save still reads, changes the state and saves it."""
    laps, tickets = [], []
    for step in range(1, steps + 1):
        began = time.perf_counter()
        trainer.backward()
        computed = time.perf_counter()
        checkpointer.fence()
        fenced = time.perf_counter()
        trainer.optim.step()
        stepped = time.perf_counter()
        tickets.append(checkpointer.save(step))
        ended = time.perf_counter()
        laps.append(Lap(ended - stepped, fenced - computed, ended - began))
    return laps, tickets


def measure(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    trainer = Trainer(options.mib * 2**20)
    state = {"model": trainer.model, "optim": trainer.optim}
    pace = ("--write-bytes-per-second", str(options.bytes_per_second), "--keep", "2")
    with running(directory / "root", *pace, listen="127.0.0.1:0") as daemon, warnings.catch_warnings():
        warnings.simplefilter("ignore", SaveWarning)
        with Checkpointer(RUN, state, at=daemon.socket, policy=options.policy) as checkpointer:
            checkpointer.restore()
            laps, tickets = train(trainer, checkpointer, options.steps)
            last_in_time = max((ticket.step for ticket in tickets if ticket.done and not ticket.dropped), default=0)
        return {
            "steps": options.steps,
            "policy": options.policy,
            "state_bytes": sum(t.nbytes for t in trainer.model.state_dict().values()) * 3,
            "bytes_per_second": options.bytes_per_second,
            "seconds": {name: _spread([getattr(lap, name) for lap in laps]) for name in Lap._fields},
            **_ends(tickets, daemon),
            "last_commit_when_training_ended": last_in_time,
        }


def _ends(tickets: Sequence[SaveTicket], daemon: RunningDaemon) -> dict[str, Any]:
    """What became of the saves, as tickets, catalog and metric tell it, and how old commits were."""
    dropped = []
    for ticket in tickets:
        try:
            ticket.result(60)
        except GenerationDropped:
            dropped.append(ticket.step)
    with Api(daemon.url) as api:
        committed = sorted(api.rounds(RUN, "committed"), key=lambda found: found.ended or "")
        listed = sorted(found.step for found in api.rounds(RUN, "dropped"))
    text = urllib.request.urlopen(f"{daemon.url}/metrics").read().decode()
    counted = re.search(r'^holdfast_rounds_total\{state="dropped"\} (\S+)', text, re.MULTILINE)
    return {
        "committed": [found.step for found in committed],
        "dropped": {
            "tickets": len(dropped),
            "catalog": len(listed),
            "metric": int(float(counted[1])) if counted else None,
            "same_steps": dropped == listed,
        },
        **_ages(committed),
    }


def _ages(committed: Sequence[bodies.Round]) -> dict[str, Any]:
    """Of each commit but the first: how long its write took, and how old the state was by then, in such writes."""
    ends = [_seconds(found.ended or "") for found in committed]
    begins = [_seconds(found.opened) for found in committed]
    writes = [end - max(before, begin) for before, begin, end in zip(ends, begins[1:], ends[1:], strict=False)]
    ages = [(end - begin) / write for begin, end, write in zip(begins[1:], ends[1:], writes, strict=True)]
    return {"write_seconds": _spread(writes), "age_of_a_commit_in_writes": _spread(ages)}


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp()


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": round(median(values), 4), "max": round(max(values), 4)} if values else {}


def missed(found: dict[str, Any]) -> list[str]:
    """The bars that were not reached, in words."""
    wrong = []
    drops, write_s = found["dropped"], found["write_seconds"].get("median", 0.0)
    if not drops["same_steps"] or len({drops["tickets"], drops["catalog"], drops["metric"]}) != 1:
        wrong.append(f"tickets, catalog and metric disagree on what was dropped: {drops}")
    if drops["tickets"] + len(found["committed"]) != found["steps"]:
        wrong.append("a save ended neither committed nor dropped")
    if found["policy"] == "newest-wins" and found["committed"][-1:] != [found["steps"]]:
        wrong.append("the newest save was not committed")
    if found["policy"] != "wait" and max(found["seconds"][name]["max"] for name in ("save", "fence")) > write_s / 2:
        wrong.append("training waited for storage")
    # A write begins with the newest save there is: by its end that is a write old, and a step that was on its way.
    if found["policy"] == "newest-wins" and found["age_of_a_commit_in_writes"]["median"] > 1 + 2 * _step_in_writes(found):
        wrong.append("commits are older than a write and the steps on its way")
    return wrong


def _step_in_writes(found: dict[str, Any]) -> float:
    return float(found["seconds"]["step"]["max"] / found["write_seconds"]["median"])


def show(found: dict[str, Any]) -> None:
    seconds, drops = found["seconds"], found["dropped"]
    rows = [
        ("steps, each saved", f"{found['steps']}"),
        ("state", f"{found['state_bytes'] / 2**20:.0f} MiB at {found['bytes_per_second'] / 1e6:.0f} MB/s"),
        ("a step", f"{seconds['step']['median'] * 1e3:.1f} ms, longest {seconds['step']['max'] * 1e3:.1f} ms"),
        ("save()", f"{seconds['save']['median'] * 1e3:.1f} ms, longest {seconds['save']['max'] * 1e3:.1f} ms"),
        ("fence()", f"{seconds['fence']['median'] * 1e3:.1f} ms, longest {seconds['fence']['max'] * 1e3:.1f} ms"),
        (
            "a write",
            f"{found['write_seconds']['median'] * 1e3:.0f} ms, longest {found['write_seconds']['max'] * 1e3:.0f} ms",
        ),
        ("dropped", f"{drops['tickets']} by tickets, {drops['catalog']} in the catalog, {drops['metric']} in the metric"),
        ("committed", f"{len(found['committed'])}, the last one is step {found['committed'][-1]}"),
        ("age at commit", "{median:.2f} writes, longest {max:.2f}".format(**found["age_of_a_commit_in_writes"])),
    ]
    print("\n".join(f"| {name:18} | {value} |" for name, value in rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--mib", type=int, default=64, help="size of the state")
    parser.add_argument("--bytes-per-second", type=int, default=100_000_000, help="of the disk")
    parser.add_argument("--policy", default="newest-wins")
    parser.add_argument("--directory", type=Path, help="on the disk in question (default: the system's temporary one)")
    parser.add_argument("--json", type=Path, help="where the numbers are written")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        found = measure(Path(directory), options)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    show(found)
    wrong = missed(found)
    print("\n".join(f"missed: {reason}" for reason in wrong) or "every bar is reached")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
