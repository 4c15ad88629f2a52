"""Puts a daemon's part in a cluster to work: its beats, what it hears of other nodes, and the care of the root."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from holdfast_formats.errors import CheckpointError
from holdfast_service.control.cluster.cluster import Cluster, Crew
from holdfast_service.control.decisions import Decisions
from holdfast_service.daemon.saving.saver import Saver

log = logging.getLogger(__name__)

UPKEEP_S = 60.0
UPKEEP = "upkeep"


def take_part(
    cluster: Cluster, decisions: Decisions, saver: Saver, about: Callable[[], dict[str, Any]], stack: ExitStack
) -> None:
    """Beat, and look after the root when that is this node's duty, until the `stack` unwinds."""
    cluster.membership.about = about
    cluster.crews.here = lambda: {run: Crew(*crew) for run, crew in saver.crews().items()}

    def look_for_newer() -> None:
        for run, newest in decisions.overtaken(saver.runs).items():
            saver.shut_out(run, newest)

    cluster.membership.heard.append(look_for_newer)
    assert decisions.care is not None
    stack.callback(Upkeep(cluster, decisions.care.look).close)
    cluster.membership.start()
    cluster.membership.beat_soon()


class Upkeep:
    """A thread that does what one node does for all, as long as that is this node's duty."""

    def __init__(self, cluster: Cluster, look: Callable[[], None], every_s: float = UPKEEP_S) -> None:
        self._cluster, self._look, self._every_s = cluster, look, every_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-upkeep", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(self._every_s):
            try:
                if self._cluster.duties.has(UPKEEP):
                    self._look()
            except CheckpointError as error:  # the next time does what this one could not
                log.warning("the root was not looked after: %s", error.detail)
            except Exception:
                log.exception("the root was not looked after")
