"""A daemon whose imports make small files, and that kills itself before a chosen act of a job: `… LOG [flags]`.

Acts are what a job does to the disk and to the catalog. Their names go to LOG, a line each: a test sees what was repeated.
The file `LOG.kill` says before which act the next job is killed; it is taken away when that job begins.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from holdfast_formats.disk.packing import pack
from holdfast_service.__main__ import main
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.jobs.catalog import Jobs
from holdfast_service.daemon.copying import importing
from holdfast_service.storage.posix import PosixFile, PosixTier

FILE_BYTES = 100_000
ACTS: tuple[tuple[type, str], ...] = (
    *((PosixTier, name) for name in ("create", "put", "sync_directory", "publish", "remove_file", "remove_tree")),
    *((PosixFile, name) for name in ("write", "finish")),
    (Catalog, "record_checkpoint"),
    (Jobs, "finish"),
)
THREADS = ("holdfast-job", "holdfast-stream_0")


class Acts:
    """Counts the acts of each job, writes them down, and kills the process before one of them."""

    def __init__(self, log: str) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._kill = Path(f"{log}.kill")
        self._kill_at, self._count, self._lock = 0, 0, threading.Lock()

    def begun(self, claim: Callable[..., Any]) -> Callable[..., Any]:
        def claiming(*arguments: Any) -> Any:
            job = claim(*arguments)
            if job is not None:
                self._count = self._kill_at = 0
                if self._kill.exists():
                    self._kill_at = int(self._kill.read_text())
                    self._kill.unlink()
            return job

        return claiming

    def counted(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def acting(*arguments: Any, **options: Any) -> Any:
            if threading.current_thread().name in THREADS:
                with self._lock:
                    self._count += 1
                    if self._count == self._kill_at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    said = arguments[1] if len(arguments) > 1 and isinstance(arguments[1], str) else ""
                    os.write(self._log, f"{name} {said}\n".encode())
            return act(*arguments, **options)

        return acting


if __name__ == "__main__":
    acts = Acts(sys.argv[1])
    for owner, attribute in ACTS:
        setattr(owner, attribute, acts.counted(attribute, getattr(owner, attribute)))
    Jobs.claim = acts.begun(Jobs.claim)  # type: ignore[method-assign]
    importing.pack = partial(pack, file_bytes_max=FILE_BYTES)  # type: ignore[assignment]
    sys.exit(main(sys.argv[2:]))
