"""Which processes take part, what memory they hold, and on which cores they may run."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

SAMPLE_EVERY_S = 0.05


def tree(*roots: int) -> list[int]:
    """These processes and all that descend from them, as far as they are alive."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                after_name = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children[int(after_name[1])].append(int(entry.name))
    found: list[int] = []
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children[pid]
    return found


def marked(variable: str, value: str) -> list[int]:
    """All that were started with this in their environment, whoever started them."""
    mark = f"{variable}={value}\0".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def pss(pids: Iterable[int]) -> int:
    """Their memory in bytes, where what is shared is divided among those who share it."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


class PeakMemory:
    """Samples the memory of process trees for the length of a block. It walks page tables: never inside a timed section."""

    def __init__(self, *roots: int) -> None:
        self._roots = roots
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.peak = 0

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            self.peak = max(self.peak, pss(tree(*self._roots)))
            if self._ended.wait(SAMPLE_EVERY_S):
                return


class Cores:
    """The trainer on a core of its own and everything else on the others, where there are more cores than ranks."""

    def __init__(self, rank: int, world: int, others: Iterable[int] = ()) -> None:
        self._all = sorted(os.sched_getaffinity(0))
        self.apart = len(self._all) > world
        self._own = {self._all[rank]} if self.apart else set(self._all)
        self._rest = set(self._all[world:]) if self.apart else set(self._all)
        self._others = tuple(others)

    def divide(self) -> None:
        """Now: threads and processes started later inherit the cores of whoever starts them."""
        if self.apart:
            self._assign(self._rest)
            os.sched_setaffinity(0, self._own)

    def free_trainer(self) -> None:
        """While it blocks in a save the trainer computes nothing, and what it starts may run anywhere."""
        if self.apart:
            os.sched_setaffinity(0, self._all)

    def free(self) -> None:
        if self.apart:
            self._assign(set(self._all))
            self.free_trainer()

    def _assign(self, cores: set[int]) -> None:
        trainer = threading.get_native_id()
        for pid in tree(os.getpid(), *self._others):
            try:
                threads = [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
            except OSError:
                continue
            for thread in threads:
                if thread != trainer:
                    _set_affinity(thread, cores)


def _set_affinity(thread: int, cores: set[int]) -> None:
    try:
        os.sched_setaffinity(thread, cores)
    except ProcessLookupError:
        return  # it ended meanwhile
