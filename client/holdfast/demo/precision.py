"""Chooses the dtype that the demo computes in: bfloat16 where the processor or the device is quick at it, float32 elsewhere.

Without bf16 instructions a bf16 product takes tens of times as long as a float32 one. The choice is made once, by measuring,
and handed to every launch of the trainer: runs that are compared bit by bit must compute in the same dtype.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

ROWS, WIDTH, INNER = 512, 128, 352  # a product like the model's own: four windows through the first layer of its MLP
REPEATS = 5


class ProductTimes(NamedTuple):
    """What the same matrix product takes in both dtypes, in seconds of one core, or of a device."""

    float32_s: float
    bfloat16_s: float

    @property
    def compute_dtype(self) -> str:
        """The quicker dtype, by its name in torch."""
        return "bfloat16" if self.bfloat16_s <= self.float32_s else "float32"

    def describe(self) -> str:
        if self.compute_dtype == "bfloat16":
            return "bf16 weights, computed in bfloat16"
        ratio = self.bfloat16_s / self.float32_s
        times = f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}"
        return f"bf16 weights, computed in float32: bf16 products take {times} times as long here"


def measure_products(device: str = "cpu") -> ProductTimes:
    """Time the product in both dtypes, on one thread, as a rank has.

    With more, on a busy machine, they wait for each other so long that the dtypes look alike.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return ProductTimes(product_s(torch.float32, device), product_s(torch.bfloat16, device))
    finally:
        torch.set_num_threads(threads)


def product_s(dtype: torch.dtype, device: str) -> float:
    """The processor's time for a product, however many other programs run; the best of a few, as the first one prepares.

    A device's time is by the clock, from idle to idle.
    """
    inputs = torch.ones(ROWS, WIDTH, dtype=dtype, device=device)
    weight = torch.ones(INNER, WIDTH, dtype=dtype, device=device)
    clock = time.thread_time if device == "cpu" else _clock_of_device
    seconds = []
    with torch.inference_mode():
        for _ in range(REPEATS):
            began = clock()
            torch.nn.functional.linear(inputs, weight)
            seconds.append(clock() - began)
    return min(seconds)


def _clock_of_device() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()
