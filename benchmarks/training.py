"""A training loop whose steps are always the same work, and what a save costs it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from statistics import mean
from typing import NamedTuple

import torch

from .peers import Peer
from .processes import Cores
from .state import State, change

MATRIX = 1024
PRODUCTS = 2  # a step, unless told otherwise: two products of 1024 x 1024 in FP32, about 50 ms on one core
STEPS_MIN, STEPS_MAX = 10, 40  # without a save, on each side of the steps with one


class Trained(NamedTuple):
    """A save under training. Seconds; `lost_s` is what the steps until it was durable took longer than without it."""

    save_s: float
    durable_s: float
    lost_s: float
    step_s: float
    steps: int


class Watch:
    """Waits for a save's end beside the trainer, and notes when it came."""

    def __init__(self, wait: Callable[[], None], began: float) -> None:
        self._wait, self._began = wait, began
        self._error: BaseException | None = None
        self._seconds = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def seconds(self) -> float:
        """From the save's beginning to its durable end; raises what the save ended with instead."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._seconds

    def _run(self) -> None:
        try:
            self._wait()
        except BaseException as error:
            self._error = error
        self._seconds = time.perf_counter() - self._began


class Work:
    """A step: fixed matrix products, then the change of every tensor, as after backward comes the optimizer."""

    def __init__(self, state: State, products: int) -> None:
        self._state, self._products = state, products
        self._left, self._right = (torch.rand(MATRIX, MATRIX) for _ in range(2))
        self._out = torch.empty(MATRIX, MATRIX)

    def step(self, fence: Callable[[], None] | None = None) -> None:
        for _ in range(self._products):
            torch.mm(self._left, self._right, out=self._out)
        if fence is not None:
            fence()
        change(self._state)

    def timed(self, steps: int) -> list[float]:
        times = []
        for _ in range(steps):
            began = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - began)
        return times


def save_under_training(
    peer: Peer, step: int, work: Work, cores: Cores, wait: Callable[[], None], before: Callable[[], None]
) -> Trained:
    """Steps without a save, a save and steps until it is durable, steps without a save.

    `before` runs right before the save, `wait` returns when it is durable. The trainer's core is its own, where there are
    enough of them; while it blocks in the save itself, it and whatever it starts may run on all.
    """
    cores.divide()
    work.timed(2)
    without = work.timed(STEPS_MIN)
    before()
    cores.free_trainer()
    began = time.perf_counter()
    peer.save(step)
    saved = time.perf_counter() - began
    watch = Watch(wait, began)
    dividing = time.perf_counter()
    cores.divide()
    dividing = time.perf_counter() - dividing
    work.step(peer.fence)
    steps = 1
    while not watch.ended:
        work.step()
        steps += 1
    took = time.perf_counter() - began - dividing
    without += work.timed(min(max(STEPS_MIN, steps), STEPS_MAX))
    cores.free()
    return Trained(saved, watch.seconds(), took - steps * mean(without), mean(without), steps)
