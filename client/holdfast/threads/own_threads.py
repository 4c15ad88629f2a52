"""The client's threads: each is stopped and joined before the interpreter ends.

They are daemon threads, so that none keeps a process alive. Python kills those that are left at exit; inside torch's
C++ code, this aborts the process, which would count as failed though its work is done.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

END_WAIT_S = 1.0  # for stopped threads: one may wait for an answer that never comes
COMPUTE_WAIT_S = 60.0  # for a thread that computes, and so ends by itself
POLL_S = 0.02
NICE = 10  # not the lowest: a thread that holds a lock must run at times

_running: dict[threading.Thread, Callable[[], object]] = {}
_computing: dict[object, None] = {}


def begin(act: Callable[[], object], name: str, stop: Callable[[], object] = bool) -> threading.Thread:
    """Call `act` in a thread. `stop` is called when the process ends: `act` returns soon after. `RuntimeError` if no
    thread can start.
    """

    def run() -> None:
        try:
            act()
        finally:
            _running.pop(threading.current_thread(), None)

    thread = threading.Thread(target=run, name=name, daemon=True)
    _running[thread] = stop
    try:
        thread.start()
    except RuntimeError:
        _running.pop(thread, None)
        raise
    return thread


def start(act: Callable[[], object], name: str = "holdfast-aside") -> None:
    """Call it in the background; directly, if no thread can be started, as at interpreter exit."""
    try:
        begin(act, name)
    except RuntimeError:
        act()


def is_own() -> bool:
    """Whether the present thread is one of these, and none of the user's."""
    return threading.current_thread() in _running


def give_way() -> None:
    """Lower the calling thread's priority for good: training has the CPU first. It never fails."""
    thread = threading.get_native_id()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, max(NICE, os.getpriority(os.PRIO_PROCESS, thread)))


@contextmanager
def computing() -> Iterator[None]:
    """The thread calls torch in the block, and waits for no other process: the process does not end meanwhile."""
    mark = object()
    _computing[mark] = None
    try:
        yield
    finally:
        del _computing[mark]


def end() -> None:
    """Stop and join all threads: those that do not compute for at most `END_WAIT_S`."""
    for stop in list(_running.values()):
        stop()
    began = time.monotonic()
    while left := [thread for thread in list(_running) if thread.is_alive()]:
        if time.monotonic() > began + (COMPUTE_WAIT_S if _computing else END_WAIT_S):
            break
        left[0].join(POLL_S)


def _forget_all() -> None:
    _running.clear()
    _computing.clear()


os.register_at_fork(after_in_child=_forget_all)  # threads stay with the parent
