"""What a save costs if only an adapter is trained: `python -m benchmarks.unchanged [--gib 2] [--rounds 7]`.

Two models share one base. One has it frozen, as in fine-tuning with LoRA; in the other its tensors require gradients, though
no optimizer steps them, so that every save is a full one. They are trained and saved in turns, and saved often enough before
that Holdfast knows what stays.

Prints how long training stood still, in `save()` and in the hook before the next step of the optimizer; how long the save
took until it was durable; and the bytes that the daemon wrote. The exit status is 1 if a bar is missed, or if the last
checkpoint is not, bit for bit, what was saved.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from holdfast import Checkpointer
from tests.daemons import RunningDaemon, running

from .drains import spread

FROZEN, TRAINED = "frozen base", "all of it"
STALL_BAR_S = 0.005
WRITTEN_BAR = 1.05  # of what changed
WIDTH = 2048  # of a layer of the base, which has 16 MiB
RANK = 8  # of an adapter
WARM = 5  # saves before the first round: two into each slot, and one more
PAUSE_S = 2.0  # after a save, for the read-back
WAIT_S = 600.0


class Saved(NamedTuple):
    """One save: seconds in `save()`, in the hook before the next step, until durable; bytes written."""

    save: float
    hook: float
    durable: float
    written: int

    @property
    def stall(self) -> float:
        return self.save + self.hook


class Adapted(nn.Module):
    """A base, and a trained adapter beside each of its layers."""

    def __init__(self, base: Sequence[torch.Tensor], frozen: bool) -> None:
        super().__init__()
        self.base = nn.ParameterList(nn.Parameter(layer, requires_grad=not frozen) for layer in base)
        self.down = nn.ParameterList(nn.Parameter(torch.randn(RANK, WIDTH)) for _ in base)
        self.up = nn.ParameterList(nn.Parameter(torch.zeros(WIDTH, RANK)) for _ in base)
        self.adapters = [*self.down, *self.up]


class Training:
    """A model and the optimizer of its adapters. `hooks` are the times before and after the hooks of its last step."""

    def __init__(self, base: Sequence[torch.Tensor], frozen: bool, daemon: RunningDaemon) -> None:
        model = Adapted(base, frozen)
        self._adapters, self.hooks = model.adapters, [0.0, 0.0]
        self._optim = torch.optim.AdamW(self._adapters, lr=1e-3)
        self.state: dict[str, Any] = {"model": model, "optim": self._optim}
        self.changes = 3 * sum(one.nbytes for one in self._adapters)  # with two moments each
        self._optim.register_step_pre_hook(lambda *_: self._look(0))
        self.checkpointer = Checkpointer("frozen" if frozen else "trained", self.state, at=daemon.socket)
        self._optim.register_step_pre_hook(lambda *_: self._look(1))
        self.step()

    def step(self) -> float:
        """A step of the optimizer; returns the seconds in Holdfast's hook before it."""
        for parameter in self._adapters:
            parameter.grad = torch.randn_like(parameter)
        self._optim.step()
        return self.hooks[1] - self.hooks[0]

    def _look(self, which: int) -> None:
        self.hooks[which] = time.perf_counter()

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.state["model"].state_dict().items()}


def written(daemon: RunningDaemon) -> int:
    """Bytes that a daemon has had written to storage so far."""
    lines = Path(f"/proc/{daemon.process.pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes:"))


def save(training: Training, number: int, daemon: RunningDaemon) -> Saved:
    """A step, a save, a step; and all that the save has the daemon do."""
    training.step()
    before, began = written(daemon), time.perf_counter()
    ticket = training.checkpointer.save(number)
    returned = time.perf_counter() - began
    hook = training.step()
    ticket.result(WAIT_S)
    durable = time.perf_counter() - began
    time.sleep(PAUSE_S)
    return Saved(returned, hook, durable, written(daemon) - before)


def restores(training: Training, number: int) -> bool:
    """Whether what was saved comes back, bit for bit, once all of it has been overwritten."""
    training.checkpointer.save(number, wait="durable")
    expected = training.tensors()
    with torch.no_grad():
        for parameter in training.state["model"].parameters():
            parameter.zero_()
    training.checkpointer.restore(number)
    return all(torch.equal(value, expected[name]) for name, value in training.tensors().items())


def measure(directory: Path, gib: float, rounds: int) -> tuple[dict[str, list[Saved]], int, bool]:
    """The saves by way, the bytes that change from save to save, and whether the last one of the frozen base is whole."""
    torch.manual_seed(5)
    base = [torch.randn(WIDTH, WIDTH) for _ in range(max(round(gib * 2**30 / (4 * WIDTH**2)), 1))]
    with running(directory / "root", "--keep", "2") as daemon:
        trainings = {way: Training(base, way == FROZEN, daemon) for way in (FROZEN, TRAINED)}
        found: dict[str, list[Saved]] = {way: [] for way in trainings}
        for number in range(1, WARM + rounds + 1):
            for way in list(trainings)[:: 1 if number % 2 else -1]:
                found[way].append(save(trainings[way], number, daemon))
            print(f"round {number - WARM}: " + "  ".join(f"{way} {saves[-1]}" for way, saves in found.items()), flush=True)
        whole = restores(trainings[FROZEN], WARM + rounds + 1)
        for training in trainings.values():
            training.checkpointer.close()
    return {way: saves[WARM:] for way, saves in found.items()}, trainings[FROZEN].changes, whole


def show(found: Mapping[str, Sequence[Saved]], changes: int, whole: bool) -> list[str]:
    """Print the table; returns what is missed."""
    rows: dict[str, Any] = {
        "save(), ms": lambda one: one.save * 1e3,
        "hook, ms": lambda one: one.hook * 1e3,
        "both, ms": lambda one: one.stall * 1e3,
        "durable, s": lambda one: one.durable,
        "written, MiB": lambda one: one.written / 2**20,
    }
    print(f"| median least most | {' | '.join(found)} |\n|---|{'---|' * len(found)}")
    for name, value in rows.items():
        print(f"| {name} | {' | '.join(spread(list(map(value, saves)), '{:.3f}') for saves in found.values())} |")
    print(f"changed: {changes / 2**20:.1f} MiB")
    stall, ratio = median(one.stall for one in found[FROZEN]), median(one.written for one in found[FROZEN]) / changes
    missed = [] if whole else ["the restored base or adapter is not what was saved"]
    missed += [f"stall: {stall * 1e3:.1f} ms, for {STALL_BAR_S * 1e3:.0f}"] if stall > STALL_BAR_S else []
    missed += [f"written: {ratio:.2f} of what changed, for {WRITTEN_BAR}"] if ratio > WRITTEN_BAR else []
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the base")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, help="of the root (default: the system's temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as place:
        missed = show(*measure(Path(place), options.gib, options.rounds))
    print("\n".join(f"missed: {reason}" for reason in missed) or "all bars are met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
