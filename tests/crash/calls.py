"""The system calls of storage and arena, one by one: a test sees each of them, and can do it, spoil it, or refuse it.

The product's own modules run; only the names through which they reach the kernel, and the database's commit, are taken over
while `steered` lasts. What is steered is listed in `_OF_STORAGE` and `_OF_ARENA`.
"""

from __future__ import annotations

import errno
import inspect
import mmap
import os
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import CodeType
from typing import Any
from unittest import mock

from sqlalchemy.engine.default import DefaultDialect

import holdfast
import holdfast_files
import holdfast_formats
import holdfast_service
from holdfast_files import direct
from holdfast_service.daemon.arena import segment
from holdfast_service.storage import PosixTier, directories, posix, scratch, writeback

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

_READING = frozenset({"fstat", "stat", "listdir", "statvfs", "preadv"})
_PRODUCT = tuple(f"{Path(module.__path__[0])}/" for module in (holdfast, holdfast_files, holdfast_formats, holdfast_service))
_OPENS = inspect.unwrap(PosixTier._directory).__code__
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

    `tried` are those places: what fails is added. Calls in a loop are one; `Fault` takes each of them. A full disk
    (ENOSPC) is met only by calls that write.
    """

    def __init__(self, code: int, tried: set[Place]) -> None:
        self._code, self._tried = code, tried
        self._lock = threading.Lock()
        self.failed = ""

    def __call__(self, name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if not self.failed and self._can_fail(name, arguments):
            places = _places(name)
            with self._lock:
                due = not self.failed and not self._tried.issuperset(places)
                if due:
                    self._tried.update(places)
                    self.failed = name
            if due:
                raise OSError(self._code, os.strerror(self._code))
        return call(*arguments, **options)

    def _can_fail(self, name: str, arguments: tuple[Any, ...]) -> bool:
        if self._code != errno.ENOSPC:
            return True
        return name not in _READING and (name != "open" or bool(arguments[1] & (os.O_WRONLY | os.O_RDWR)))


def _places(name: str) -> tuple[Place, ...]:
    """What fails if the call that is being made does: its way, the innermost line first.

    A tier opens directories name by name, by several calls that change nothing: from each place that asks for one, one of
    them fails, and each of them from one place.
    """
    opening: Place = ()
    way, frame = [name], sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if not _is_product(frame.f_code):
            continue
        way.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        if frame.f_code is _OPENS and not frame.f_locals["make"]:
            opening, way = tuple(way), ["a directory"]
    return (opening, tuple(way)) if opening else (tuple(way),)


@cache
def _is_product(code: CodeType) -> bool:
    return code.co_filename.startswith(_PRODUCT)


def _write_half(call: Callable[..., int], descriptor: int, views: list[memoryview], offset: int) -> int:
    return call(descriptor, [views[0][: (views[0].nbytes + 1) // 2]], offset)
