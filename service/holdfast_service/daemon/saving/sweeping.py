"""Sweeps runs without a checkpoint, long after their ranks have left. A rank that says hello meanwhile finds its run, or
creates it again: check and removal are atomic, and no rank of that run is admitted meanwhile (`fencing`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from holdfast_formats.errors import CheckpointError
from holdfast_service.daemon.arena.arena import Arena
from holdfast_service.daemon.saving.saver import Saver

log = logging.getLogger(__name__)

LOOK_S = 600.0
_Declared = TypeVar("_Declared")


class EmptyRuns(Protocol[_Declared]):
    """Control's list of runs without a checkpoint."""

    def due(self) -> Mapping[str, _Declared]: ...
    def forget(self, run: str) -> bool: ...
    def sweep(self, run: str, declared: _Declared) -> bool: ...
    def restore(self, run: str) -> None: ...


class Sweeper:
    """A thread that looks from time to time; `look` may be called besides."""

    def __init__(
        self,
        empty: EmptyRuns[_Declared],
        saver: Saver,
        arena: Arena,
        look_s: float = LOOK_S,
        tidy: Callable[[], object] = lambda: None,
    ) -> None:
        """`tidy` removes other due items: deleted runs from the trash. It is called at once, too."""
        self._empty, self._tidy = empty, tidy
        self._saver, self._arena = saver, arena
        self._look_s = look_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-sweeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def sweep(self) -> list[str]:
        """Sweep what is due, and return it."""
        return [
            run for run, declared in self._empty.due().items() if not self._closing.is_set() and self._sweep(run, declared)
        ]

    def _sweep(self, run: str, declared: Any) -> bool:
        if run in self._saver.connected.runs or self._arena.has(run) or not self._empty.forget(run):
            return False
        swept = False
        try:
            with self._saver.entering(run):
                swept = not self._arena.has(run) and self._saver.vacate(run) and self._empty.sweep(run, declared)
        finally:
            if not swept:
                self._empty.restore(run)
        return swept

    def _run(self) -> None:
        self._try(self._tidy, "deleted runs")
        while not self._closing.wait(self._look_s):
            self._try(self.sweep, "empty runs")
            self._try(self._tidy, "deleted runs")

    def _try(self, act: Callable[[], object], what: str) -> None:
        try:
            act()
        except CheckpointError as error:  # the next look tries again
            log.warning("cannot remove %s: %s", what, error.detail)
        except Exception:
            log.exception("cannot remove %s", what)
