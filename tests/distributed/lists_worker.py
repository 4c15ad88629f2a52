"""Run on each rank: tensor parallelism with a distributed optimizer, as in Megatron, trained from the newest step on.

    lists_worker.py SOCKET OUTPUT TP DP STEPS

Each rank has gate and up of a fused weight in one tensor, and a range of its elements in FP32 with momentum. With TP 0, one
rank has everything in plain tensors. Rank 0 writes the whole weight, master and momentum to OUTPUT.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from holdfast import Checkpointer, Fragment
from tests.torchruns import leave

HALF, COLUMNS = 12, 7
SHAPE = (2 * HALF, COLUMNS)
WHOLE = torch.arange(float(2 * HALF * COLUMNS)).reshape(SHAPE)
GRADIENT = WHOLE % 5  # with steps of powers of two, all results are exact


class Range:
    """The elements that a rank has of its tensor-parallel part: all of them in order, and the Fragments of some of them."""

    def __init__(self, tp: int, dp: int, rank: int) -> None:
        self.tp, self.share = tp, HALF // tp
        self.corners = [self.share * (rank % tp), HALF + self.share * (rank % tp)]
        size = 2 * self.share * COLUMNS
        self.start, self.stop = (size * (rank // tp + n) // dp for n in (0, 1))

    def local(self, source: torch.Tensor) -> torch.Tensor:
        """The rank's rows of gate, and below them its rows of up."""
        return torch.cat([source[at : at + self.share] for at in self.corners])

    def weights(self, held: torch.Tensor) -> list[Fragment]:
        return [
            Fragment(held[self.share * n : self.share * (n + 1)], SHAPE, offset=(at, 0)) for n, at in enumerate(self.corners)
        ]

    def parts(self, held: torch.Tensor) -> list[Fragment]:
        """The Fragments of the range, of which the optimizer holds `held`."""
        found, edge = [], self.share * COLUMNS
        for n, corner in enumerate(self.corners):
            a, b = max(self.start, n * edge), min(self.stop, (n + 1) * edge)
            if a < b:
                cut = held[a - self.start : b - self.start]
                flat = (a - n * edge, b - n * edge)
                box = (self.share, COLUMNS)
                found.append(Fragment(cut, SHAPE, offset=(corner, 0), box=box, flat=flat, held=held))
        return found


def gathered(parts: list[Fragment]) -> torch.Tensor:
    """The whole tensor, put together of all ranks' parts without the product; replicas count once."""
    found, times = torch.zeros(SHAPE), torch.zeros(SHAPE)
    for part in parts:
        at = 0
        for box in part.boxes:
            found[box.slices] = part.tensor.detach().reshape(-1)[at : at + box.volume].reshape(box.shape).float()
            times[box.slices] += 1
            at += box.volume
    dist.all_reduce(found)
    dist.all_reduce(times)
    return found / times


def build(tp: int, dp: int) -> tuple[dict[str, Any], nn.Parameter, torch.Tensor]:
    """The state, the parameter that the optimizer holds, and its gradient."""
    if not tp:
        master = nn.Parameter(WHOLE.clone())
        state: dict[str, Any] = {"model": {"w": WHOLE.bfloat16()}, "master": {"w": master}}
        gradient = GRADIENT
    else:
        mine = Range(tp, dp, dist.get_rank())
        master = nn.Parameter(mine.local(WHOLE).reshape(-1)[mine.start : mine.stop].clone())
        gradient = mine.local(GRADIENT).reshape(-1)[mine.start : mine.stop]
        weights = mine.weights(mine.local(WHOLE).bfloat16())
        state = {"model": {"w": weights}, "master": {"w": mine.parts(master)}}
    return state | {"optim": torch.optim.SGD([master], lr=0.125, momentum=0.5)}, master, gradient


def update(state: dict[str, Any], tp: int) -> torch.Tensor:
    """Give the weights the values of the masters; return the whole masters."""
    if not tp:
        state["model"]["w"].copy_(state["master"]["w"].detach())
        return state["master"]["w"].detach()
    whole = gathered(state["master"]["w"])
    for part in state["model"]["w"]:
        [box] = part.boxes
        part.tensor.copy_(whole[box.slices])
    return whole


def main() -> None:
    socket, output, *numbers = sys.argv[1:]
    tp, dp, steps = map(int, numbers)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    state, master, gradient = build(tp, dp)
    with Checkpointer("r", state, at=socket) as checkpointer:
        for step in range(checkpointer.restore() + 1, steps + 1):
            master.grad = gradient * step
            state["optim"].step()
            update(state, tp)
            if step == steps:
                checkpointer.save(step, wait="durable")
    momentum = state["optim"].state[master]["momentum_buffer"]
    if tp:
        mine = Range(tp, dp, dist.get_rank())
        found = [gathered(state["model"]["w"]), gathered(state["master"]["w"]), gathered(mine.parts(momentum))]
    else:
        found = [state["model"]["w"].float(), master.detach(), momentum]
    if dist.get_rank() == 0:
        torch.save(found, output)
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
