"""What commands of ours run as `sys.executable -m …`, begun by a fork that has the service imported already.

A test that asks for `forked_programs` finds a script as `sys.executable`. It hands its arguments, environment, directory and
streams over, waits, and ends as the program does; whoever started it sees no difference.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import socket
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from tests.forked import MESSAGE_BYTES_MAX, PYTHON, ask_to_begin, ended, wait_for_end

_SCRIPT = f"""#!{PYTHON} -IS
import json, os, socket, sys
asked = {{"arguments": sys.argv[1:], "environment": dict(os.environ), "directory": os.getcwd()}}
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as to:
    to.connect("ADDRESS")
    socket.send_fds(to, [json.dumps(asked).encode()], [0, 1, 2])
    status = int(to.recv(16))
sys.exit(status if status >= 0 else 128 - status)
"""


class _Programs:
    """Listens for scripts, each in a thread of its own; they are few."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="hf-")
        atexit.register(self._directory.cleanup)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        address = Path(self._directory.name) / "programs"
        self._listener.bind(str(address))
        self._listener.listen()
        self.script = Path(self._directory.name) / "python"
        self.script.write_text(_SCRIPT.replace("ADDRESS", str(address)))
        self.script.chmod(0o700)
        threading.Thread(target=self._accept, name="test-programs", daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._run, args=(connection,), daemon=True).start()

    def _run(self, connection: socket.socket) -> None:
        with connection:
            message, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES_MAX, 3)
            pid = ask_to_begin("daemon", json.loads(message), descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            wait_for_end(pid)
            connection.send(b"%d" % (ended("daemon", pid) or 0))


@functools.cache
def _programs() -> _Programs:
    return _Programs()


@pytest.fixture
def forked_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that this test has the product start are forks."""
    monkeypatch.setattr(sys, "executable", str(_programs().script))
