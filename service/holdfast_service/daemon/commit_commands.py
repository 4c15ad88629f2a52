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
from pathlib import Path
from typing import Any, Protocol

from holdfast_formats import naming
from holdfast_formats.disk.manifest import Manifest
from holdfast_formats.errors import CatalogUnavailable
from holdfast_formats.rest.operations import Level
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

    def __init__(self, command: Command, news: CommandNews, recorded: Callable[[float], bool], root: Path) -> None:
        """`recorded` waits at most so many seconds until the catalog has all commits, and returns whether it does."""
        self._command, self._news, self._recorded, self._root = command, news, recorded, root
        self._changed = threading.Condition()
        self._waiting: deque[Manifest] = deque()
        self._running = False
        self._wake, self._woken = os.pipe()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="holdfast-on-commit", daemon=True)
        self._thread.start()

    def committed(self, made: Manifest) -> None:
        """A checkpoint was committed. Returns at once."""
        late = None
        with self._changed:
            if self._closed:
                late = made
            else:
                if len(self._waiting) == WAITING_MAX:
                    late = self._waiting.popleft()
                self._waiting.append(made)
                self._changed.notify_all()
        if late is not None:
            why = "the daemon is ending" if late is made else f"{WAITING_MAX} newer commits wait already"
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
        for made in left:
            self._failed(made, "was not run: the daemon ended before")
        os.close(self._wake)
        os.close(self._woken)

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._running = False
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                made, self._running = self._waiting.popleft(), True
            try:
                self._run(made)
            except Exception as error:
                log.exception("the command of --on-commit for %s@%s", made.run, made.step)
                self._failed(made, f"could not be run: {error}")

    def _run(self, made: Manifest) -> None:
        if not self._is_mine(made):
            return
        began = time.monotonic()
        ended = tied_command.run(self._command, self._root, self._wake, _about(made, self._root))
        log.info(
            "--on-commit for %s@%s: %s after %.1f s", made.run, made.step, ended.how or "done", time.monotonic() - began
        )
        if ended.how:
            self._failed(made, ended.how)
            # Only in the log: not every reader of a run's events may read a command's output.
            log.warning("--on-commit for %s@%s printed at last: %r", made.run, made.step, ended.output)

    def _is_mine(self, made: Manifest) -> bool:
        """Whether to run this checkpoint's command: another node that finished the same commit may have done so."""
        if not self._recorded(RECORDED_S):
            log.warning("--on-commit for %s@%s: the catalog does not know of it yet", made.run, made.step)
        text = f"the command of --on-commit was started for step {made.step}"
        try:
            return self._news.record_once(
                "commit-command-started", text, made.run, made.step, attempt=made.attempt, created=made.created
            )
        except CatalogUnavailable as away:
            log.warning("--on-commit for %s@%s: its start is not recorded: %s", made.run, made.step, away.detail)
            return True

    def _failed(self, made: Manifest, how: str) -> None:
        text = f"the command of --on-commit for step {made.step} {how}"
        self._news.add("commit-command-failed", text, made.run, made.step, "warning", attempt=made.attempt, why=how)


def _about(made: Manifest, root: Path) -> dict[str, str]:
    return {
        "HOLDFAST_RUN": made.run,
        "HOLDFAST_STEP": str(made.step),
        "HOLDFAST_ATTEMPT": str(made.attempt),
        "HOLDFAST_PATH": str(root / naming.checkpoint_path(made.run, made.step)),
        "HOLDFAST_GROUPS": ",".join(made.groups),
        "HOLDFAST_BYTES": str(made.bytes),
    }
