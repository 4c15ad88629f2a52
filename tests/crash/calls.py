"""The system calls of storage and arena, one by one: a test sees each of them, and can do it, spoil it, or refuse it.

The product's own modules run; only the names through which they reach the kernel, and the database's commit, are taken over
while `steered` lasts. What is steered is listed in `_OF_STORAGE` and `_OF_ARENA`.
"""

from __future__ import annotations

import errno
import mmap
import os
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

from sqlalchemy.engine.default import DefaultDialect

from holdfast_service.daemon.arena import segment
from holdfast_service.storage import direct, directories, posix, scratch, writeback

_OF_STORAGE = frozenset(
    {"open", "mkdir", "unlink", "rmdir", "rename", "ftruncate", "fstat", "stat", "listdir", "statvfs", "pwrite"}
)
_OF_ARENA = frozenset({"memfd_create", "ftruncate", "mmap"})
_BOUND = {  # calls that posix.py and writeback.py hold under names of their own
    (posix, "_fsync"): "fsync",
    (posix, "_pwritev"): "pwritev",
    (posix, "_preadv"): "preadv",
    (posix, "_rename"): "renameat2",
    (posix, "_exchange"): "exchange",
    (posix, "_link"): "link",
    (posix, "_reserve"): "fallocate",
    (writeback, "_start_writeback"): "sync_file_range",
    (writeback, "_await_writeback"): "sync_file_range",
}
_SQLITE_SAYS = {errno.ENOSPC: "database or disk is full", errno.EROFS: "attempt to write a readonly database"}

_PRODUCT = ("holdfast", "holdfast_formats", "holdfast_service")
Place = tuple[str, ...]
Steer = Callable[..., Any]  # (name, call, *arguments, **options) -> what the caller gets


class _Module:
    """A module of the standard library of which some calls go through `steer`."""

    def __init__(self, module: Any, steered: frozenset[str], steer: Steer) -> None:
        self._module, self._steered, self._steer = module, steered, steer

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return partial(self._steer, name, found) if name in self._steered else found


@contextmanager
def steered(steer: Steer) -> Iterator[None]:
    """While this lasts, `steer` is asked to do every call, in whichever thread it is made."""
    with mock.patch.object(DefaultDialect, "do_commit", _commit(steer)), _patched(steer):
        yield


@contextmanager
def _patched(steer: Steer) -> Iterator[None]:
    patches = [mock.patch.object(module, "os", _Module(os, _OF_STORAGE, steer)) for module in (posix, directories)]
    patches += [mock.patch.object(module, "os", _Module(os, _OF_STORAGE, steer)) for module in (direct, scratch)]
    patches += [
        mock.patch.object(segment, "os", _Module(os, _OF_ARENA, steer)),
        mock.patch.object(segment, "mmap", _Module(mmap, _OF_ARENA, steer)),
    ]
    patches += [
        mock.patch.object(module, bound, partial(steer, name, getattr(module, bound)))
        for (module, bound), name in _BOUND.items()
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in reversed(patches):
            patch.stop()


def _commit(steer: Steer) -> Callable[..., None]:
    sound = DefaultDialect.do_commit

    def do_commit(dialect: DefaultDialect, connection: Any) -> None:
        try:
            steer("sql commit", sound, dialect, connection)
        except OSError as error:
            raise sqlite3.OperationalError(_SQLITE_SAYS.get(error.errno or 0, "disk I/O error")) from error

    return do_commit


class Fault:
    """Lets the `at`-th call fail with an errno, once.

    With `short`, the `at`-th write takes half, and its rest fails.
    """

    def __init__(self, at: int, code: int, short: bool = False) -> None:
        self._at, self._code, self._short = at, code, short
        self._name = "pwritev" if short else ""
        self._halved = False
        self._lock = threading.Lock()
        self.seen = 0
        self.failed = ""

    def __call__(self, name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        with self._lock:
            due = False
            if self._name in ("", name):
                self.seen += 1
                due = self.seen == self._at
            if due and self._short and not self._halved:
                self._at, self._halved = self._at + 1, True  # the rest of this very write is what does not fit
                return _write_half(call, *arguments)
            if due:
                self.failed = name
        if due:
            raise OSError(self._code, os.strerror(self._code))
        return call(*arguments, **options)


class PlaceFault:
    """Lets a call fail that the product makes at a place, and on a way to it, from which none has failed yet; once.

    `tried` are those places: what fails is added. Calls in a loop are one; `Fault` takes each of them.
    """

    def __init__(self, code: int, tried: set[Place]) -> None:
        self._code, self._tried = code, tried
        self._lock = threading.Lock()
        self.failed = ""

    def __call__(self, name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        place = (name, *_way())
        with self._lock:
            due = not self.failed and place not in self._tried
            if due:
                self._tried.add(place)
                self.failed = name
        if due:
            raise OSError(self._code, os.strerror(self._code))
        return call(*arguments, **options)


def _way() -> Iterator[str]:
    """The lines of the product that have led to the call that is being made, the innermost first."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        module = str(frame.f_globals.get("__name__"))
        if module.partition(".")[0] in _PRODUCT:
            yield f"{module}:{frame.f_lineno}"


def _write_half(call: Callable[..., int], descriptor: int, views: list[memoryview], offset: int) -> int:
    return call(descriptor, [views[0][: (views[0].nbytes + 1) // 2]], offset)
