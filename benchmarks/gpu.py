"""What a save costs a training on a GPU, held against what the GPU can do. Exits with 1 where one of the bars is missed.

python -m benchmarks.gpu [--state-bytes 4000000000] [--runs 7] [--directory DIRECTORY] [--json PATH]

Three bars: staging runs at 0.9 of a copy into page-locked memory or faster; a step of plain computing, longer than the copy,
takes at most 2 % more with a save in flight; and what is restored is bit for bit what was there when the save was called,
though the optimizer stepped right behind it. As in training, the host is ahead of the device when it saves. Beside the
second bar stand the step with nothing but a plain copy of as many bytes in flight, the step of a loop that waits for its
device before each save, and how long `save()` keeps its caller. Without a CUDA device it says so and exits with 0.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import torch

from holdfast import Checkpointer
from holdfast.stage.cuda_copy import CHUNK_BYTES
from tests.daemons import running

RUN = "gpu"
BYTES_A_PARAMETER = 12  # a float32 weight and two moments
LAYERS = 16
MATRIX = 8192  # one product of such keeps a large GPU busy for some milliseconds
STEP_IN_COPIES = 1.5  # how much longer than the copy a step is
AHEAD_PRODUCTS = 2  # what the device still has to do when `save()` is called
LIMIT_BYTES_MAX = 2**30  # page-locked beside the slots, to measure the limit
SPEED_MIN, SLOWDOWN_MAX = 0.9, 1.02


class Trainer:
    """Layers under a fused AdamW, of `size` bytes with its moments, and products of matrices that stand for the compute."""

    def __init__(self, home: torch.device, size: int, matrix: int) -> None:
        torch.manual_seed(0)
        width = max(int((size / BYTES_A_PARAMETER / LAYERS) ** 0.5), 1)
        layers = (torch.nn.Linear(width, width, bias=False, device=home) for _ in range(LAYERS))
        self.model = torch.nn.Sequential(*layers)
        self.optim = torch.optim.AdamW(self.model.parameters(), fused=True)
        self._matrices = torch.randn(2, matrix, matrix, device=home)
        self._product = torch.empty(matrix, matrix, device=home)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optim.step()

    def compute(self, products: int) -> None:
        for _ in range(products):
            torch.mm(self._matrices[0], self._matrices[1], out=self._product)

    def step(self, products: int) -> None:
        self.compute(products)
        self.optim.step()

    def tensors(self) -> list[torch.Tensor]:
        moments = [value for kept in self.optim.state.values() for value in kept.values()]
        return [parameter.detach() for parameter in self.model.parameters()] + moments


class Clock:
    """Times what a device does, from an idle device to an idle device. Waiting for it is what this benchmark may do."""

    def __init__(self, home: torch.device) -> None:
        self._module: Any = torch.get_device_module(home)

    def seconds(self, work: Callable[[], object]) -> float:
        self._module.synchronize()
        began = time.perf_counter()
        work()
        self._module.synchronize()
        return time.perf_counter() - began


def measure(home: torch.device, directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Every run measures limit, staging, and a step with and without a save, in turn; each save is loaded and compared."""
    trainer, clock = Trainer(home, options.state_bytes, options.matrix), Clock(home)
    size = sum(tensor.nbytes for tensor in trainer.tensors())
    limit = _limit(home, size)
    runs = []
    with running(directory / "root", "--keep", "1") as daemon:
        state = {"model": trainer.model, "optim": trainer.optim}
        with Checkpointer(RUN, state, at=daemon.socket) as checkpointer:
            checkpointer.prepare(wait=True)
            checkpointer.save(1, wait="durable")
            products = _products(trainer, clock, STEP_IN_COPIES * size / _rate(limit, clock))
            for number in range(options.runs):
                runs.append(_run(trainer, clock, checkpointer, 3 * number + 2, products) | {"limit": _rate(limit, clock)})
                runs[-1]["staging"] = size / runs[-1].pop("staging_s")
                runs[-1]["step_with_copy_s"] = clock.seconds(lambda: _copy_and_step(trainer, limit, size, products))
                runs[-1]["step_from_idle_s"] = clock.seconds(lambda: trainer.step(products))
    return {"device": _name(home), "state_bytes": size, "products": products, "runs": runs}


def _run(trainer: Trainer, clock: Clock, checkpointer: Checkpointer, step: int, products: int) -> dict[str, Any]:
    """A save with nothing beside it, up to the end of its copies; a step alone; saves with a step right behind them."""

    def stage() -> None:
        tickets.append(checkpointer.save(step))
        checkpointer.fence()

    def step_behind(ahead: int, saved: int | None) -> None:
        trainer.compute(ahead)
        began = time.perf_counter()
        if saved is not None:
            tickets.append(checkpointer.save(saved))
            calls.append(time.perf_counter() - began)
        trainer.step(products)

    tickets: list[Any] = []
    calls: list[float] = []
    staging_s = clock.seconds(stage)
    tickets[-1].result()
    from_idle_s = clock.seconds(lambda: step_behind(0, step + 1))
    tickets[-1].result()
    without_s = clock.seconds(lambda: step_behind(AHEAD_PRODUCTS, None))
    expected = [tensor.cpu().clone() for tensor in trainer.tensors()]
    with_s = clock.seconds(lambda: step_behind(AHEAD_PRODUCTS, step + 2))
    tickets[-1].result()
    for tensor in trainer.tensors():
        tensor.zero_()
    checkpointer.restore(step + 2)
    pairs = zip(expected, trainer.tensors(), strict=True)
    exact = all(torch.equal(a.view(-1).view(torch.uint8), b.cpu().view(-1).view(torch.uint8)) for a, b in pairs)
    steps = {"step_s": without_s, "step_with_save_s": with_s, "step_from_idle_with_save_s": from_idle_s}
    return {"staging_s": staging_s, **steps, "save_call_s": median(calls), "exact": exact}


def _copy_and_step(trainer: Trainer, limit: Callable[[], int], size: int, products: int) -> None:
    """The least that a save can be: so many bytes on their way on a stream of their own, and the step behind them."""
    if not torch.cuda.is_available():
        limit()
        trainer.step(products)
        return
    side: Any = torch.get_device_module("cuda").Stream()
    side.wait_stream(torch.cuda.current_stream())
    copied = 0
    with torch.cuda.stream(side):
        while copied < size:
            copied += limit()
    trainer.compute(products)
    torch.cuda.current_stream().wait_stream(side)
    trainer.optim.step()


def _limit(home: torch.device, size: int) -> Callable[[], int]:
    """A copy in chunks into page-locked memory, which says how much it copied."""
    source = torch.zeros(min(size, LIMIT_BYTES_MAX), dtype=torch.uint8, device=home)
    target = torch.empty(len(source), dtype=torch.uint8, pin_memory=home.type == "cuda")
    parts = list(zip(torch.split(target, CHUNK_BYTES), torch.split(source, CHUNK_BYTES), strict=True))

    def copy() -> int:
        for into, part in parts:
            into.copy_(part, non_blocking=True)
        return len(source)

    return copy


def _rate(limit: Callable[[], int], clock: Clock) -> float:
    """Bytes a second, once warm."""
    size = limit()
    return size / min(clock.seconds(limit) for _ in range(3))


def _products(trainer: Trainer, clock: Clock, seconds: float) -> int:
    """How many products take so long."""
    trainer.compute(2)
    return max(ceil(seconds / (clock.seconds(lambda: trainer.compute(4)) / 4)), 1)


def _name(home: torch.device) -> str:
    return str(torch.cuda.get_device_name(home)) if home.type == "cuda" else str(home)


def summary(found: dict[str, Any]) -> list[tuple[str, float, float, bool]]:
    """Each bar: its name, the median over the runs, what it must reach, whether it does."""
    runs = found["runs"]
    speed = median(run["staging"] / run["limit"] for run in runs)
    slowdown = median(run["step_with_save_s"] / run["step_s"] for run in runs)
    exact = sum(run["exact"] for run in runs) / len(runs)
    return [
        ("staging / pinned-copy limit, at least", speed, SPEED_MIN, speed >= SPEED_MIN),
        ("step with a save / without, at most", slowdown, SLOWDOWN_MAX, slowdown <= SLOWDOWN_MAX),
        ("share of saves that are bit-exact", exact, 1.0, exact == 1.0),
    ]


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu: there is no CUDA device here, so there is nothing to measure")
        return 0
    with tempfile.TemporaryDirectory(prefix="holdfast-gpu-", dir=options.directory) as directory:
        found = measure(torch.device("cuda", torch.cuda.current_device()), Path(directory), options)
    bars = summary(found)
    size, runs = f"{found['state_bytes'] / 2**30:.2f} GiB", len(found["runs"])
    print(f"gpu: {found['device']}, {size}, {runs} runs, {found['products']} products a step")
    for name, value, bar, reached in bars:
        print(f"  {name:<40} {value:8.3f}   bar {bar:5.2f}   {'reached' if reached else 'MISSED'}")
    copying = median(run["step_with_copy_s"] / run["step_from_idle_s"] for run in found["runs"])
    idle = median(run["step_from_idle_with_save_s"] / run["step_from_idle_s"] for run in found["runs"])
    calls = sorted(1000 * run["save_call_s"] for run in found["runs"])
    print(f"  step with a plain copy / without         {copying:8.3f}   the device's own limit")
    print(f"  the same, where the device waited        {idle:8.3f}   save() included")
    print(f"  save(), ms: median {median(calls):.2f}, from {calls[0]:.2f} to {calls[-1]:.2f}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))
    return 0 if all(reached for *_, reached in bars) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="What a save costs on a GPU.")
    parser.add_argument("--state-bytes", type=int, default=4_000_000_000, help="parameters and moments, about so many")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--matrix", type=int, default=MATRIX, help="rows of the matrices whose products are the compute")
    parser.add_argument(
        "--directory", type=Path, help="where checkpoints go, and are removed from; a temporary one otherwise"
    )
    parser.add_argument("--json", type=Path, help="write every sample there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
