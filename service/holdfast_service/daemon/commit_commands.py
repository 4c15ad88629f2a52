"""Runs an operator's command after each commit, one after the other, without delaying saves.

Each checkpoint's command is run once, by the node that committed it. A restarted daemon does not run it for earlier commits.
Failures and timeouts are events.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import CatalogUnavailable
from holdfast_formats.rest.operations import Level
from holdfast_service.config import RootPlace
from holdfast_service.daemon import tied_command
from holdfast_service.daemon.tied_command import Command

log = logging.getLogger(__name__)

WAITING_MAX = 64  # commits that wait for their command; of more, the oldest go without
RECORDED_S = 10.0  # how long the catalog may take to know of a commit before the command may ask for it


class CommandNews(Protocol):
    """Records the results of commands."""

    def add(
        self, kind: str, text: str, run: str | None = None, step: int | None = None, level: Level = "info", **detail: Any
    ) -> None: ...
    def record_once(self, kind: str, text: str, run: str, step: int, **detail: Any) -> bool: ...


class CommitCommands:
    """The thread that runs the command. Other threads report commits to it without waiting."""

    def __init__(self, command: Command, news: CommandNews, recorded: Callable[[float], bool], root: RootPlace) -> None:
        """`recorded` waits at most so many seconds until the catalog has all commits, and returns whether it does."""
        self._command, self._news, self._recorded, self._root = command, news, recorded, root
        self._changed = threading.Condition()
        self._waiting: deque[Manifest] = deque()
        self._running = False
        self._wake, self._woken = os.pipe()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="holdfast-on-commit", daemon=True)
        self._thread.start()

    def committed(self, manifest: Manifest) -> None:
        """A checkpoint was committed. Returns at once."""
        late = None
        with self._changed:
            if self._closed:
                late = manifest
            else:
                if len(self._waiting) == WAITING_MAX:
                    late = self._waiting.popleft()
                self._waiting.append(manifest)
                self._changed.notify_all()
        if late is not None:
            why = "the daemon is stopping" if late is manifest else f"{WAITING_MAX} newer commits are already waiting"
            self._failed(late, f"was not run: {why}")

    def busy(self) -> bool:
        with self._changed:
            return self._running or bool(self._waiting)

    def close(self) -> None:
        """Kill the running command, and run no other."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            left = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        os.write(self._woken, b"x")
        self._thread.join()
        for committed in left:
            self._failed(committed, "was not run: the daemon stopped first")
        os.close(self._wake)
        os.close(self._woken)

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._running = False
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                committed, self._running = self._waiting.popleft(), True
            try:
                self._run(committed)
            except Exception as error:
                log.exception("the command of --on-commit for %s@%s", committed.run, committed.step)
                self._failed(committed, f"could not be run: {error}")

    def _run(self, manifest: Manifest) -> None:
        if not self._is_mine(manifest):
            return
        began = time.monotonic()
        ended = tied_command.run(self._command, self._root.directory, self._wake, _about(manifest, self._root))
        log.info(
            "--on-commit for %s@%s: %s after %.1f s",
            manifest.run,
            manifest.step,
            ended.how or "done",
            time.monotonic() - began,
        )
        if ended.how:
            self._failed(manifest, ended.how)
            # Only in the log: not every reader of a run's events may read a command's output.
            log.warning("--on-commit for %s@%s; last output: %r", manifest.run, manifest.step, ended.output)

    def _is_mine(self, manifest: Manifest) -> bool:
        """Whether to run this checkpoint's command: another node that finished the same commit may have done so."""
        if not self._recorded(RECORDED_S):
            log.warning("--on-commit for %s@%s: the checkpoint is not in the catalog yet", manifest.run, manifest.step)
        text = f"the command of --on-commit was started for step {manifest.step}"
        try:
            return self._news.record_once(
                "commit-command-started",
                text,
                manifest.run,
                manifest.step,
                attempt=manifest.attempt,
                created=manifest.created,
            )
        except CatalogUnavailable as away:
            log.warning("--on-commit for %s@%s: cannot record its start: %s", manifest.run, manifest.step, away.detail)
            return True

    def _failed(self, manifest: Manifest, how: str) -> None:
        text = f"the command of --on-commit for step {manifest.step} {how}"
        self._news.add(
            "commit-command-failed", text, manifest.run, manifest.step, "warning", attempt=manifest.attempt, why=how
        )


def _about(manifest: Manifest, root: RootPlace) -> dict[str, str]:
    return {
        "HOLDFAST_RUN": manifest.run,
        "HOLDFAST_STEP": str(manifest.step),
        "HOLDFAST_ATTEMPT": str(manifest.attempt),
        "HOLDFAST_PATH": root.checkpoint(manifest.run, manifest.step),
        "HOLDFAST_GROUPS": ",".join(manifest.groups),
        "HOLDFAST_BYTES": str(manifest.bytes),
    }
