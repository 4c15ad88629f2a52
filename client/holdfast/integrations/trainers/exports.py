"""Exports of a run's checkpoints for other programs: jobs of the daemon, after each commit."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from holdfast.integrations.trainers.export_places import ExportPlace
from holdfast.integrations.trainers.options import is_remote
from holdfast.link.own_daemon import OwnDaemon
from holdfast.rest.api import Api
from holdfast.threads import own_threads
from holdfast.tickets import SaveTicket
from holdfast_formats.errors import CheckpointError, DaemonGone, InvalidRequest
from holdfast_formats.rest.jobs import EXPORT_KINDS, ExportArguments, ExportJob

log = logging.getLogger(__name__)

STILL_S = 600.0  # how long the end of a training waits for an export that writes nothing


def check(options: Mapping[str, Any]) -> None:
    """`InvalidRequest` for what is no mapping of kinds to directories."""
    given = options.get("exports")
    if given is None:
        return
    if not isinstance(given, Mapping) or not all(isinstance(place, str | PathLike) for place in given.values()):
        raise InvalidRequest(
            f"exports={given!r} is no mapping of kinds to directories", hint='exports={"paddle-uc": "output-uc"}'
        )
    unknown = sorted(set(map(str, given)) - EXPORT_KINDS.keys())
    if unknown:
        raise InvalidRequest(f"there is no export {unknown[0]!r}", hint=f"one of {', '.join(EXPORT_KINDS)}")


class Exports:
    """Exports the newest committed step into DIRECTORY/checkpoint-N for each kind, one at a time, in a thread.

    A step that is not exported yet when a newer one is committed is left out. Older exports beyond `limit` are removed, but
    not that of the step that `best` returns. With a daemon on another machine, the directories are below its --export-root,
    where none is removed, and it goes on with a job when this process ends.
    """

    def __init__(
        self, run: str, root: Path | None, options: Mapping[str, Any], limit: int | None, best: Callable[[], int | None]
    ) -> None:
        self._limit, self._best = limit, best
        self._run, self._root, self._at = run, root, str(options.get("at"))
        self._remote = is_remote(options)
        self._kinds = {kind: os.fspath(place) for kind, place in options["exports"].items()}
        self._changed = threading.Condition()
        self._wanted: int | None = None  # the newest committed step that is not exported yet
        self._closing = False
        self._moved = time.monotonic()  # when an export last wrote something
        self._thread = own_threads.begin(self._serve, "holdfast-exports", lambda: self.close(wait=False))

    def after(self, ticket: SaveTicket) -> None:
        """Export the step once it is committed."""
        ticket.when_ended(lambda error: self.of(ticket.step) if error is None and not ticket.dropped else None)

    def of(self, step: int) -> None:
        """Export this committed step next."""
        with self._changed:
            self._wanted = step
            self._changed.notify()

    def close(self, wait: bool) -> None:
        """End, after the export of the newest step if `wait`; else one that is being made ends with this process.

        An export that writes nothing for `STILL_S` is not awaited any longer.
        """
        with self._changed:
            self._closing = True
            self._wanted = self._wanted if wait else None
            self._moved = time.monotonic()
            self._changed.notify()
        while wait and self._thread.is_alive():
            left = self._moved + STILL_S - time.monotonic()
            if left <= 0:
                log.warning(
                    "an export of %s has written nothing for %.0f s, and is not awaited: look at the daemon's log, and "
                    "export the newest step with `holdfast export`",
                    self._run,
                    STILL_S,
                )
                return
            self._thread.join(left)

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._wanted is not None)
                step, self._wanted = self._wanted, None
            if step is None:
                return
            for kind, place in self._kinds.items():
                self._export(step, kind, f"{place}/checkpoint-{step}")
                self._rotate(place)

    def _moves(self, done: int, total: int) -> None:
        self._moved = time.monotonic()

    def _export(self, step: int, kind: str, to: str) -> None:
        if not self._remote and os.path.lexists(to):
            return
        target = to if self._remote else os.path.abspath(to)
        try:
            job = ExportJob(run=self._run, step=step, arguments=ExportArguments(to=target, form=kind))
            if self._remote:
                with Api(self._at) as api:
                    log.info("job %d exports %s@%d as %s", api.submit_job(job).id, self._run, step, kind)
                return
            daemon = None if self._root is None else OwnDaemon.serving(self._root)
            if daemon is None:
                raise DaemonGone(f"no daemon of this user serves {self._root}", hint="start one with `holdfast serve`")
            daemon.do(job, self._moves)
            log.info("exported %s@%d as %s: %s", self._run, step, kind, to)
            ExportPlace(os.path.dirname(target), self._run).note(step)
        except (CheckpointError, OSError) as error:
            log.warning("%s@%d was not exported as %s: %s", self._run, step, kind, error)

    def _rotate(self, place: str) -> None:
        if self._limit is None or self._remote:
            return
        try:
            ExportPlace(place, self._run).rotate(self._limit, self._best())
        except OSError as error:
            log.warning("old exports of %s in %s were not removed: %s", self._run, place, error)
