"""Prepares the memory of a slot: for the first save while the model is still being set up."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import torch

from holdfast.stage import cuda_copy
from holdfast.stage.slots import Slots
from holdfast.threads import own_threads
from holdfast_formats.errors import CheckpointError

log = logging.getLogger(__name__)


class Preallocation:
    def __init__(
        self, reserve: Callable[[], Slots], devices: Sequence[torch.device] = (), which: Sequence[int] = ()
    ) -> None:
        """Prepare these slots, by default those that are leased first."""
        self._reserve, self._devices, self._which = reserve, devices, which
        self._stop = threading.Event()
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
            for slot in self._which or slots.first:
                slots.touch(slot, self._stop)
                if not self._stop.is_set():
                    cuda_copy.pin(slots, slot, self._devices)
        except CheckpointError as error:
            # The first save tries again, and reports the problem.
            log.info("could not prepare slots ahead of a save: %s", error.detail)
