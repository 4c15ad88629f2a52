"""A daemon and a trainer that are started at the same time: whoever is second waits for the first one."""

from __future__ import annotations

import os
import signal
import threading

from holdfast.link import embedded
from holdfast.link.roots import running_socket
from holdfast_formats import naming
from holdfast_formats.root_files import DaemonFile, decode
from holdfast_service.storage.locking import lock_root
from tests.daemons import runtime_directory, wait_until


def test_a_root_that_somebody_has_and_does_not_serve_yet_is_waited_for() -> None:
    """The root is locked, and no daemon answers: one comes up once the lock is gone."""
    with runtime_directory() as made:
        root, found = made / "root", []
        lock = lock_root(root)
        starting = threading.Thread(target=lambda: found.append(embedded.start(root)))
        starting.start()
        wait_until(lambda: (root / embedded.LOG).exists() and "in use" in (root / embedded.LOG).read_text())
        lock.release()
        starting.join()
        assert found == [running_socket(root)]
        file = decode(DaemonFile, (root / naming.DAEMON_FILE).read_bytes())
        assert file is not None
        os.kill(file.pid, signal.SIGTERM)
        wait_until(lambda: not (root / naming.DAEMON_FILE).exists() and not found[0].exists())
