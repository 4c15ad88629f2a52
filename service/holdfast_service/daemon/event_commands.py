"""Runs an operator's command for each event of this node, with the event as JSON on its input.

At most once: events that happen without a daemon, or wait when it ends, are skipped. Events wait in the catalog; no save
waits for them. Failures are logged and counted, but are no events, because these would run the command again.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from holdfast_formats.errors import CheckpointError
from holdfast_formats.rest.operations import Event
from holdfast_service.control.catalog.events import Events
from holdfast_service.daemon import tied_command
from holdfast_service.daemon.tied_command import Command

log = logging.getLogger(__name__)

AT_ONCE = 4  # commands
READ_MAX = 100  # events
LOOK_S = 5.0  # and soon after this process has recorded an event,
LINGER_S = 0.1  # after the queue is empty: reading makes the catalog flush its writes early
OUTCOMES = ("done", "failed", "dropped")


class EventCommands:
    """The threads that run the command. Recording an event never waits for them."""

    def __init__(self, command: Command, events: Events, node: str, kinds: Collection[str], root: Path) -> None:
        """The command runs for these `kinds`; none: all."""
        self._command, self._events, self._node = command, events, node
        self._kinds, self._root = frozenset(kinds), root
        self.counts = {outcome: 0 for outcome in OUTCOMES}
        self._lock = threading.Lock()
        self._going = 0
        self._free = threading.Semaphore(AT_ONCE)
        self._wake, self._woken = os.pipe()
        self._closing, self._changed = threading.Event(), threading.Event()
        self._position = self._newest()
        self._pool = ThreadPoolExecutor(AT_ONCE, "holdfast-on-event")
        self._deaf = events.listen(self._changed.set)
        self._thread = threading.Thread(target=self._loop, name="holdfast-on-event", daemon=True)
        self._thread.start()

    def busy(self) -> bool:
        with self._lock:
            return self._going > 0 or self._changed.is_set()

    def close(self) -> None:
        """End running commands, and start no other."""
        if self._closing.is_set():
            return
        self._deaf()
        self._closing.set()
        self._changed.set()
        os.write(self._woken, b"x")
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._free.release()  # the loop may wait for it
        self._thread.join()
        os.close(self._wake)
        os.close(self._woken)

    def _loop(self) -> None:
        while not self._closing.is_set():
            try:
                more = self._read()
            except CheckpointError as away:
                log.info("--on-event is waiting for the catalog: %s", away.detail)
                more = False
            except Exception:
                log.exception("--on-event")
                more = False
            if not more and self._changed.wait(LOOK_S):
                self._closing.wait(LINGER_S)

    def _read(self) -> bool:
        """Start the command for new events, and wait for its turn; True if there may be more."""
        self._changed.clear()
        if self._position is None:
            self._position = self._newest()
            return False
        events = self._events.following(self._position, READ_MAX)
        if self._position > events.newest:  # the catalog was made again
            self._position = events.newest
        elif self._position and self._position < events.forgotten:
            with self._lock:
                self.counts["dropped"] += 1
            log.warning(
                "--on-event is too slow: events between %d and %d are no longer stored",
                self._position + 1,
                events.forgotten,
            )
            if not events.events:
                self._position = events.forgotten
        for event in events.events:
            if self._closing.is_set():
                return False
            self._position = event.id
            if event.node == self._node and (not self._kinds or event.kind in self._kinds):
                self._start(event)
        return len(events.events) == READ_MAX

    def _start(self, event: Event) -> None:
        self._free.acquire()
        if self._closing.is_set():
            return
        with self._lock:
            self._going += 1
        with suppress(RuntimeError):  # it was closed in this moment
            self._pool.submit(self._run, event)

    def _run(self, event: Event) -> None:
        how, output = "could not be run", ""
        try:
            ended = tied_command.run(self._command, self._root, self._wake, {}, event.model_dump_json().encode() + b"\n")
            how, output = ended
        except OSError as error:
            how = f"could not be run: {error.strerror}"
        except Exception:
            log.exception("the command of --on-event")
        finally:
            with self._lock:
                self._going -= 1
                self.counts["failed" if how else "done"] += 1
            self._free.release()
        if how:
            log.warning("--on-event for event %d (%s): it %s; its last output: %r", event.id, event.kind, how, output)

    def _newest(self) -> int | None:
        """The newest event; None while the catalog is unavailable: then the first later event counts."""
        try:
            return self._events.bounds()[1]
        except CheckpointError:
            return None
