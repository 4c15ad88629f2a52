"""Prepares the memory for the first save while the model is still being set up."""

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
    def __init__(self, reserve: Callable[[], Slots], devices: Sequence[torch.device] = ()) -> None:
        self._reserve, self._devices = reserve, devices
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
            slots.touch(self._stop)
            if not self._stop.is_set():
                cuda_copy.pin(slots, self._devices)
        except CheckpointError as error:
            # The first save tries again, and reports the problem.
            log.info("could not reserve slots ahead of the first save: %s", error.detail)
