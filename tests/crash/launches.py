"""Launches of ranks that are killed, what they have said, and what is left of them and of their daemons."""

from __future__ import annotations

import itertools
import os
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.read.directory_root import committed_steps
from holdfast.read.root_directory import open_checkpoint
from holdfast_formats import naming
from tests.crash.rank_process import content
from tests.daemons import wait_until
from tests.forked import Forked

RUN, WORLD = "r", 2
_launches = itertools.count()
started: list[subprocess.Popen[Any] | Forked] = []


class Ranks:
    """The processes of a launch, and what each of them has said so far. `steps` are all ranks' or each one's own."""

    def __init__(self, socket: Path | None, steps: str | Sequence[str], size: int, root: Path | None = None) -> None:
        launch = f"launch-{next(_launches)}"
        each = [steps] * WORLD if isinstance(steps, str) else steps
        self.said: list[list[str]] = [[] for _ in each]
        self._readers, self.processes = [], []
        for rank, mine in enumerate(each):
            words = ["-m", "tests.crash.rank_process", socket or "-", RUN, rank, len(each), launch, mine, size]
            process = Forked([*words, *([] if root is None else [root])], talks=True)
            reader = threading.Thread(target=self._read, args=(rank, process), daemon=True)
            reader.start()
            self._readers.append(reader)
            self.processes.append(process)
            started.append(process)

    def _read(self, rank: int, process: Forked) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.said[rank].append(line.strip())

    def wait_for(self, line: str, *ranks: int) -> None:
        """Wait until these ranks (all that live, unless given) have said a line."""
        asked = ranks or range(len(self.processes))
        wait_until(lambda: all(line in self.said[rank] or self.processes[rank].poll() is not None for rank in asked))
        assert any(line in self.said[rank] for rank in asked), (line, self.said)
        assert not ranks or all(line in self.said[rank] for rank in ranks), (line, self.said)

    def go(self, *ranks: int) -> None:
        """Let these ranks (all, unless given) pass the line at which they wait."""
        for rank in ranks or range(len(self.processes)):
            stdin = self.processes[rank].stdin
            assert stdin is not None
            stdin.write("go\n")

    def kill(self, *ranks: int) -> None:
        for rank in ranks or range(len(self.processes)):
            self.processes[rank].kill()
        for rank in ranks or range(len(self.processes)):
            self.processes[rank].wait()

    def end(self, killed: bool = True) -> None:
        """No rank is left: `killed`, or because its input ends."""
        if killed:
            self.kill()
        for process, reader in zip(self.processes, self._readers, strict=True):
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.wait(180)
            reader.join()
            process.stdout.close()

    def steps(self, line: str) -> set[int]:
        """The steps of which every rank has said a line, such as `asking`."""
        return set.intersection(*({int(one.split()[-1]) for one in said if one.startswith(line)} for said in self.said))


def kill_all() -> None:
    """End what a test has left."""
    for process in started:
        process.kill()
        process.wait()
    started.clear()


def processes(directory: Path, what: bytes) -> list[int]:
    """The processes whose command names something and a path in a directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:  # it has ended meanwhile
                continue
            if what in command and bytes(directory) in command:
                found.append(int(entry.name))
    return found


def holders(directory: Path) -> list[int]:
    """The holder processes whose sockets lie in a directory."""
    return processes(directory, b"holder.py")


def check_sound(root: Path, visible: Sequence[int], size: int) -> None:
    """These steps and no others are visible, hold what the ranks saved, and nothing else stands beside them."""
    assert sorted(committed_steps(root, RUN)) == sorted(visible)
    directory = root / RUN / naming.CHECKPOINTS  # which the first commit makes
    assert len(os.listdir(directory) if directory.is_dir() else ()) == len(visible)
    for step in sorted(visible)[-4:]:
        with open_checkpoint(root, None, RUN, step) as reader:
            assert reader.verify() == []
            assert np.array_equal(reader.read("model", "w"), content(step, 0, reader.manifest.world * size))


def is_empty(root: Path, room: str) -> bool:
    directory = root / RUN / room
    return not directory.is_dir() or not any(directory.iterdir())
