"""Prepares the memory of a slot: for the first save while the model is still being set up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import torch

from holdfast.stage import cuda_copy
from holdfast.stage.slots import Slots
from holdfast.threads import own_threads
from holdfast.threads.latch import Latch
from holdfast_formats.errors import CheckpointError

log = logging.getLogger(__name__)


Which = Callable[[Slots, Latch], Iterable[int]]


class Preallocation:
    def __init__(
        self,
        reserve: Callable[[], Slots],
        devices: Sequence[torch.device] = (),
        which: Which = lambda slots, stop: slots.first,
    ) -> None:
        """Prepare these slots, by default those that are leased first. `RuntimeError` if no thread can start."""
        self._reserve, self._devices, self._which = reserve, devices, which
        self._stop = Latch()
        self._thread = own_threads.begin(self._run, "holdfast-prepare", self._stop.set)

    def stop(self) -> None:
        """End early. The memory stays reserved."""
        self._stop.set()

    def join(self) -> None:
        """Wait until the memory is ready or the attempt has failed."""
        self._thread.join()

    def _run(self) -> None:
        try:
            slots = self._reserve()
            for slot in self._which(slots, self._stop):
                slots.touch(slot, self._stop)
                if not self._stop.is_set():
                    cuda_copy.pin(slots, slot, self._devices)
        except CheckpointError as error:
            # The first save tries again, and reports the problem.
            log.info("could not prepare slots ahead of a save: %s", error.detail)
