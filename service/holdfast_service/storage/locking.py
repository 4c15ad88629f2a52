"""The lock on a root: one daemon at a time, or several that share a catalog."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from holdfast_formats import naming
from holdfast_formats.errors import RootBusy
from holdfast_formats.root_files import check_root_place

from .posix import FILE_MODE, make_root
from .translation import translated


class RootLock:
    """A held lock; the kernel releases it when the process ends, however it ends."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """Release the lock; does nothing the second time."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def lock_root(root: Path, shared: bool = False) -> RootLock:
    """Lock `root`, creating it if missing; `RootBusy` names the process that holds it. `shared` allows daemons that share a
    catalog.

    `InvalidRequest` for a directory inside a run or a checkpoint.
    """
    check_root_place(root)
    make_root(root)
    with translated("lock", str(root)):
        return _lock(root, root / naming.LOCK, shared)


def lock_node(root: Path, node: str) -> RootLock:
    """Lock the name of a node in `root`, for one daemon of this machine; `RootBusy` names the process that has it."""
    with translated("lock", str(root)):
        try:
            return _lock(root, root / naming.node_lock(node), shared=False)
        except RootBusy as error:
            raise RootBusy(
                f"another daemon of this machine has the name {node!r}: {error.detail}",
                hint="give every daemon of a root its own name: --node NAME",
                **error.members,
            ) from None


def _lock(root: Path, path: Path, shared: bool) -> RootLock:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    try:
        return take(root, descriptor, shared)
    except BaseException:
        os.close(descriptor)
        raise


def take(root: Path, descriptor: int, shared: bool = False) -> RootLock:
    """Lock the open lock file of `root` and write our process id into it; `RootBusy` names the process that holds it."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = _holder(descriptor)
        raise RootBusy(
            f"{root} is in use by {f'process {holder}' if holder else 'another process'}",
            hint="only one daemon can serve a root: use that daemon, stop it, or choose another root. Daemons of several "
            "nodes share one if all of them have the same --catalog postgresql://…",
            pid=holder,
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return RootLock(descriptor)


def _holder(descriptor: int) -> int | None:
    with suppress(ValueError):
        return int(os.pread(descriptor, 32, 0))
    return None
