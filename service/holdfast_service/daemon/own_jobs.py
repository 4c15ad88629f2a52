"""Jobs that the daemon does for commands of its own user, who may name any path.

No token and no other user of the machine gets here: the kernel says which process is at the other end of the socket.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from holdfast_formats.errors import Forbidden, InvalidRequest, RoundAborted
from holdfast_formats.staging import wire
from holdfast_service.daemon.arena.callers import Caller
from holdfast_service.daemon.arena.peer import PeerProcess
from holdfast_service.daemon.copying.progress import Progress

SENT_EVERY_S = 0.2

OwnJobs = Callable[[wire.DoJob, Progress], dict[str, Any]]


def no_jobs(request: wire.DoJob, progress: Progress) -> dict[str, Any]:
    """Refuse it."""
    raise InvalidRequest("this daemon runs no jobs for commands", hint="stop it and pass --root")


def check_own(caller: Caller, peer: PeerProcess) -> None:
    """`Forbidden` unless the peer is a process of the daemon's user that sees the same files: else the daemon would open for
    it what it could not open itself, such as files outside of its container.
    """
    if caller.uid != os.geteuid():
        raise Forbidden(
            f"only the daemon's own user, {os.geteuid()}, and not for user {caller.uid}",
            hint="use --url and a path below the daemon's --export-root",
        )
    if not peer.shares_files(caller.pid):
        raise Forbidden(
            f"process {caller.pid} sees other files than the daemon, as in a container",
            hint="run the command where the daemon runs, or use --url and a path below the daemon's --export-root",
        )


class SentProgress:
    """Sends the progress of a job at intervals, and stops the job when the peer is gone or the daemon is closing."""

    def __init__(self, send: Callable[[wire.Message], None], gone: Callable[[], bool]) -> None:
        self._send, self._gone, self._next_s = send, gone, 0.0

    def report(self, done_bytes: int, total_bytes: int) -> None:
        """Send it, if the last message is some time ago; `RoundAborted` if the command is gone."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + SENT_EVERY_S
        if self._gone():
            raise RoundAborted("the command was stopped, or the daemon is closing", hint="run the same command again")
        self._send(wire.JobProgress(done_bytes=done_bytes, total_bytes=total_bytes))
