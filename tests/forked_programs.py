"""What commands of ours run as `sys.executable -m …`, begun by a fork that has the service imported already.

A test that asks for `forked_programs` finds a script as `sys.executable`. It hands its arguments, environment, directory and
streams over, waits, and ends as the program does; what started it sees no difference. If the script is killed, so is the
program.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import socket
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.forked import MESSAGE_BYTES_MAX, PYTHON, Kind, ask_to_begin, ended, wait_for_end

_SCRIPT = f"""#!{PYTHON} -IS
import json, os, socket, sys
asked = {{"arguments": [*BEFORE, *sys.argv[1:]], "environment": dict(os.environ), "directory": os.getcwd(), "kind": "KIND"}}
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as to:
    to.connect("ADDRESS")
    socket.send_fds(to, [json.dumps(asked).encode()], [0, 1, 2])
    status = int(to.recv(16))
sys.exit(status if status >= 0 else 128 - status)
"""


class Programs:
    """Listens for scripts, each in a thread of its own; they are few."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="hf-")
        atexit.register(self._directory.cleanup)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._address = Path(self._directory.name) / "programs"
        self._listener.bind(str(self._address))
        self._listener.listen()
        self.python = Path(self._directory.name) / "python"
        self.write(self.python, "daemon")
        threading.Thread(target=self._accept, name="test-programs", daemon=True).start()

    def write(self, script: Path, kind: Kind, *before: str) -> None:
        """Write a script that runs Python with the arguments `before`, and its own, where a process of `kind` begins."""
        text = _SCRIPT.replace("ADDRESS", str(self._address)).replace("KIND", kind).replace("BEFORE", str(before))
        script.write_text(text)
        script.chmod(0o700)

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._run, args=(connection,), daemon=True).start()

    def _run(self, connection: socket.socket) -> None:
        with connection:
            message, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES_MAX, 3)
            asked = json.loads(message)
            kind: Kind = asked.pop("kind")
            pid = ask_to_begin(kind, asked, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            process = os.pidfd_open(pid)
            try:
                ready, _, _ = select.select([process, connection], [], [])
                if process not in ready:  # the script has ended before its program
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                    wait_for_end(pid)
            finally:
                os.close(process)
            with suppress(OSError):
                connection.send(b"%d" % (ended(kind, pid) or 0))


@functools.cache
def programs() -> Programs:
    return Programs()


@pytest.fixture
def forked_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that this test has the product start are forks."""
    monkeypatch.setattr(sys, "executable", str(programs().python))
