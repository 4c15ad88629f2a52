"""What `model="from-master"` saves and costs: both ways in turn, on one daemon and one state.

python -m benchmarks.from_master [--mib 256] [--rounds 7] [--directory DIR]

Of each save: how long training would stand still for all of its copy (`save()` and the fence right after it), until it is
durable, and the processor time of the daemon. Every save changes every master; weights follow.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.state import llama
from holdfast import Checkpointer
from tests.daemons import RunningDaemon, running

WAYS: dict[str, dict[str, Any]] = {"copied": {}, "from-master": {"model": "from-master"}}


class Weights:
    """BF16 weights, F32 masters and moments of a small Llama, as the state of a trainer."""

    def __init__(self, state_bytes: int) -> None:
        torch.manual_seed(0)
        self.state: dict[str, Any] = {"model": {}, "master": {}, "moments": {}}
        for shape in llama(state_bytes):
            group, _, name = shape.name.partition("/")
            tensor = torch.randn(shape.dims) if group == "master" else torch.zeros(shape.dims, dtype=shape.dtype)
            place, name = (group, name) if group in self.state else ("moments", shape.name)
            self.state[place][name] = tensor
        self.step()

    @property
    def parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.state["master"].values())

    def step(self) -> None:
        for name, master in self.state["master"].items():
            master.mul_(1.0001)
            self.state["model"][name].copy_(master)
        for moment in self.state["moments"].values():
            moment.add_(0.001)


def _cpu_s(daemon: RunningDaemon) -> float:
    fields = Path(f"/proc/{daemon.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def measure(directory: Path, state_bytes: int, rounds: int) -> dict[str, Any]:
    """Medians by way, in seconds and bytes a parameter; and of the first save, which compares all weights."""
    weights = Weights(state_bytes)
    found: dict[str, dict[str, list[float]]] = {way: {"stall_s": [], "durable_s": [], "daemon_cpu_s": []} for way in WAYS}
    result: dict[str, Any] = {"parameters": weights.parameters, "rounds": rounds}
    with running(directory / "root") as daemon:
        made = {
            way: Checkpointer(way, weights.state, at=daemon.socket, fenced=True, keep_last=1, **options)
            for way, options in WAYS.items()
        }
        for number in range(rounds + 1):
            for way in list(WAYS)[:: 1 if number % 2 else -1]:
                weights.step()
                before, began = _cpu_s(daemon), time.perf_counter()
                ticket = made[way].save(number)
                returned = time.perf_counter() - began
                made[way].fence()
                stall = time.perf_counter() - began
                ticket.result()
                durable = time.perf_counter() - began
                if number == 0:
                    result[f"{way}: first save() s"] = round(returned, 3)
                    continue
                for key, value in (("stall_s", stall), ("durable_s", durable), ("daemon_cpu_s", _cpu_s(daemon) - before)):
                    found[way][key].append(value)
        for way, checkpointer in made.items():
            staged = checkpointer._contents.layout.data_bytes
            medians = {key: round(statistics.median(values), 4) for key, values in found[way].items()}
            result[way] = {"bytes a parameter": round(staged / weights.parameters, 3), **medians}
            checkpointer.close()
    pairs = zip(found["from-master"]["stall_s"], found["copied"]["stall_s"], strict=True)
    result["stall, median of pairs"] = round(statistics.median(a / b for a, b in pairs), 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, default=None)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        print(json.dumps(measure(Path(directory), given.mib * 2**20, given.rounds), indent=1))


if __name__ == "__main__":
    main()
