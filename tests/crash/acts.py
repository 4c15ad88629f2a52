"""Acts of imports and exports on the disk: counted, written down, and a process that kills or stops itself before one."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from holdfast_formats.disk.packing import pack
from holdfast_service.storage import posix
from holdfast_service.storage.posix import PosixFile, PosixTier
from holdfast_service.wings.convert import importing
from holdfast_service.wings.convert.exports import dcp, safetensors_files
from holdfast_service.wings.convert.exports.paddle import flex as paddle_flex

FILE_BYTES = 100_000
EXPORTED_FILE_BYTES = 4_000
ONE_FILE_BYTES = 10**12  # a limit from which on the format has one file
ACTS: tuple[tuple[type, str], ...] = (
    *((PosixTier, name) for name in ("create", "put", "sync_directory", "publish", "remove_file", "remove_tree")),
    *((PosixFile, name) for name in ("write", "finish")),
)


class Acts:
    """Counts acts of some threads, writes them down, and has something happen before one of them.

    The file `LOG.kill` says before which; it is taken away when the work begins. `SIGKILL` comes in the middle of a write.
    """

    def __init__(self, log: str, threads: tuple[str, ...]) -> None:
        self._log, self._threads = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), threads
        self._kill = Path(f"{log}.kill")
        self._due_at, self._count, self._lock = 0, 0, threading.Lock()
        self._how = "KILL"

    def begin(self) -> None:
        """Count from here on. `LOG.kill` has a number, and perhaps what is to happen: KILL, INT, TERM, ENOSPC."""
        self._count = self._due_at = 0
        if self._kill.exists():
            number, _, how = self._kill.read_text().partition(" ")
            self._due_at, self._how = int(number), how or "KILL"
            self._kill.unlink()

    def counted(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def acting(*arguments: Any, **options: Any) -> Any:
            if threading.current_thread().name in self._threads:
                with self._lock:
                    self._count += 1
                    due = self._count == self._due_at
                    said = arguments[1] if len(arguments) > 1 and isinstance(arguments[1], str) else ""
                    os.write(self._log, f"{name} {said}\n".encode())
                if due:
                    self._happen(name, act, arguments)
            return act(*arguments, **options)

        return acting

    def _happen(self, name: str, act: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if self._how == "ENOSPC":
            posix._pwritev = posix._reserve = posix._fsync = self._full  # type: ignore[assignment]
            return
        if name == "write" and self._how == "KILL":
            writer, offset, (data, *_) = arguments
            act(writer, offset, [bytes(data)[: len(bytes(data)) // 2]])
        os.kill(os.getpid(), getattr(signal, f"SIG{self._how}"))

    @staticmethod
    def _full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def install(self, *more: tuple[type, str]) -> None:
        """Count all acts."""
        for owner, attribute in (*ACTS, *more):
            setattr(owner, attribute, self.counted(attribute, getattr(owner, attribute)))


def small_files() -> None:
    """Have imports and exports make many files of little."""
    importing.pack = partial(pack, file_bytes_max=FILE_BYTES)  # type: ignore[assignment]
    dcp.target_files = partial(dcp.target_files, file_bytes_max=EXPORTED_FILE_BYTES)  # type: ignore[assignment]
    paddle_flex.array_files = partial(paddle_flex.array_files, file_bytes_max=EXPORTED_FILE_BYTES)  # type: ignore[assignment]
    safetensors_files.pack = _packed  # type: ignore[assignment]


def _packed(specs: Any, file_bytes_max: int) -> Any:
    return pack(specs, file_bytes_max if file_bytes_max >= ONE_FILE_BYTES else EXPORTED_FILE_BYTES)
