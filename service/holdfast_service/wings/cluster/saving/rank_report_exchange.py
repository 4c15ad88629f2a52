"""Exchanges ranks' statements with other nodes: where a launch stops, and which saves are stuck.

It runs in its own thread, which queries the catalog only while something is to be agreed on. No rank waits for the catalog:
it asks its daemon again, or gives up by itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from holdfast_formats.errors import CatalogUnavailable
from holdfast_service.daemon.saving.other_nodes import LocalRanks
from holdfast_service.daemon.saving.rounds import LaunchKey
from holdfast_service.daemon.saving.stop_agreement import StopAgreement
from holdfast_service.daemon.saving.stuck_rounds import OpenSaves, held_together
from holdfast_service.wings.cluster.rank_reports import RankReports

log = logging.getLogger(__name__)

POLL_S = 0.3  # while something is to be agreed on
AWAY_S = 0.5  # between two tries, while the catalog is away
NOTHING: Mapping[str, object] = {"passed": {}, "gone": []}


class RankReportExchange:
    """Thread-safe."""

    def __init__(self, words: RankReports, node: str, here: LocalRanks, stops: StopAgreement) -> None:
        self._words, self._node, self._here, self._stops = words, node, here, stops
        self._known: set[LaunchKey] = set()  # launches whose statements from an earlier daemon were loaded
        self._wake, self._closing = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="holdfast-ranks", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """A statement was added, here or on another node."""
        self._wake.set()

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        pause: float | None = None
        while not self._closing:
            self._wake.wait(pause)
            self._wake.clear()
            try:
                pause = POLL_S if self._meet() else None
            except CatalogUnavailable as away:
                log.info("cannot send the ranks' reports to other nodes: %s", away.detail)
                self._stops.apart()
                pause = AWAY_S
            except Exception:
                log.exception("agreeing on the ranks' reports with other nodes failed")
                pause = AWAY_S

    def _meet(self) -> bool:
        """Exchange statements; returns whether something is still to be agreed on."""
        launches = self._here.launches()
        for stopping in self._words.stopping({key.run for key in launches}) if launches else ():
            if LaunchKey(*stopping) in launches:
                self._stops.ask(LaunchKey(*stopping))
        waited_for = self._here.waited_for()
        for key, saves in waited_for.items():
            words = self._words.report(*key, "waiting", saves.report())
            held = [OpenSaves.from_report(word.said) for word in held_together(words, self._node) if word.node != self._node]
            if held:
                self._here.end_stuck(key, saves, held)
        undecided = self._stops.undecided()
        for key in undecided:
            self._agree(key)
        return bool(waited_for or undecided)

    def _agree(self, key: LaunchKey) -> None:
        if key not in self._known:
            for word in self._words.reports(*key, "stopping"):
                if word.node == self._node:
                    self._stops.remember(key, word.said)
            self._known.add(key)
        decided = self._words.decided(*key, "stopping")
        if decided is None:
            words = self._words.report(*key, "stopping", self._stops.undecided().get(key, NOTHING))
            step = self._stops.hear(key, [word.said for word in words])
            if step is not None:
                decided = self._words.decide(*key, "stopping", {"step": step})
            elif len(words) == 1:  # the other nodes do not know yet
                self._words.notify()
        if decided is not None:
            self._stops.decide(key, decided["step"])
