"""Does anything grow? Many saves in a row, and what daemon and trainer hold meanwhile.

python -m benchmarks.growth --saves 200

The daemon's memory is counted without the arena, whose size is known: slots times the state. A column grows when the
median of its last quarter lies above that of its second quarter by more than noise; the first quarter is warming up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from holdfast import Checkpointer
from holdfast_formats import naming
from tests.daemons import RunningDaemon, running

MIB = 2**20
SAMPLE_EVERY_S = 0.1
ARENA = "/memfd:holdfast-"
# Files are being verified while we look; SQLite folds its log back into the catalog at 4 MiB; other counts have no noise.
NOISE = {"daemon_mib": 4.0, "trainer_mib": 8.0, "root_mib": 4.5, "daemon_fds": 3.0, "trainer_fds": 1.0}
COLUMNS = ("saves", "daemon_mib", "trainer_mib", "arena_mib", "daemon_fds", "trainer_fds", "sockets", "threads", "root_mib")


def own_bytes(pid: int) -> tuple[int, int]:
    """A process's memory without the arena, and the arena's pages that it maps.

    Libraries count whole: a share of them would change when other processes come and go.
    """
    own = arena = 0
    in_arena = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        word = line.split(maxsplit=1)[0]
        if not word.endswith(":"):
            in_arena = ARENA in line
        elif word == "Rss:":
            size = int(line.split()[1]) * 1024
            own, arena = (own, arena + size) if in_arena else (own + size, arena)
    return own, arena


def descriptors(pid: int) -> tuple[int, int]:
    """How many descriptors a process has, and how many of them are sockets."""
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except FileNotFoundError:  # closed meanwhile
            continue
    return len(links), sum(link.startswith("socket:") for link in links)


def stored_bytes(root: Path) -> int:
    """What lies below a root beside the checkpoints themselves."""
    size = 0
    for directory, below, files in os.walk(root):
        below[:] = [name for name in below if name != naming.CHECKPOINTS]
        for name in files:
            with suppress(FileNotFoundError):  # the removal of an older checkpoint is under way
                size += os.stat(os.path.join(directory, name)).st_blocks * 512
    return size


def sample(saves: int, daemon: RunningDaemon) -> dict[str, float]:
    """One row: what is held after so many saves."""
    ours, theirs = os.getpid(), daemon.process.pid
    own, arena = own_bytes(theirs)
    fds, sockets = descriptors(theirs)
    our_fds, our_sockets = descriptors(ours)
    return {
        "saves": saves,
        "daemon_mib": own / MIB,
        "trainer_mib": own_bytes(ours)[0] / MIB,
        "arena_mib": arena / MIB,
        "daemon_fds": fds,
        "trainer_fds": our_fds,
        "sockets": sockets + our_sockets,
        "threads": len(os.listdir(f"/proc/{theirs}/task")) + threading.active_count(),
        "root_mib": stored_bytes(daemon.root) / MIB,
    }


class Peak:
    """The most memory, without the arena, that a process has had since this began."""

    def __init__(self, pid: int) -> None:
        self._pid, self.mib = pid, 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> float:
        self._ended.set()
        self._thread.join()
        return self.mib

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_EVERY_S):
            self.mib = max(self.mib, own_bytes(self._pid)[0] / MIB)


def growing(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The columns that grow, each with how much from the second quarter to the last."""
    quarter = max(len(rows) // 4, 1)
    found = {}
    for column in COLUMNS[1:]:
        early = statistics.median(row[column] for row in rows[quarter : 2 * quarter] or rows[:1])
        late = statistics.median(row[column] for row in rows[-quarter:])
        if late - early > NOISE.get(column, 0):
            found[column] = late - early
    return found


def measure(root: Path, saves: int, size: int, tensors: int) -> dict[str, Any]:
    """Save so often a state of so many bytes in so many tensors, keeping two, and say what was held all the while."""
    each = max(size // tensors // 4, 1)
    state = {"weights": {f"layer.{i}.weight": torch.full((each,), float(i)) for i in range(tensors)}}
    rows = []
    every = max(saves // 20, 1)
    with running(root) as daemon, Checkpointer("growth", state, at=daemon.socket, keep_last=2) as checkpointer:
        checkpointer.restore()
        peak = Peak(daemon.process.pid)
        began = time.monotonic()
        for step in range(1, saves + 1):
            for tensor in state["weights"].values():
                tensor[0] += 1
            ticket = checkpointer.save(step)
            if step % every == 0:
                ticket.result()
                rows.append(sample(step, daemon))
        seconds = time.monotonic() - began
        peak_mib = peak.end()
    return {
        "saves": saves,
        "state_mib": 4 * each * tensors / MIB,
        "tensors": tensors,
        "seconds": seconds,
        "daemon_peak_mib": peak_mib,
        "rows": rows,
        "growing": growing(rows),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("--saves", type=int, default=200)
    parser.add_argument("--bytes", type=int, default=128 * MIB, help="of the state (default: 128 MiB)")
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--at", type=Path, help="a directory on the disk to use (default: the system's for temporary files)")
    parser.add_argument("--out", type=Path, help="where the numbers go, as JSON")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.at, prefix="growth-") as directory:
        found = measure(Path(directory) / "root", given.saves, given.bytes, given.tensors)
    print(" ".join(f"{column:>12}" for column in COLUMNS))
    for row in found["rows"]:
        print(" ".join(f"{row[column]:12.1f}" for column in COLUMNS))
    grows = ", ".join(f"{column} by {by:.1f}" for column, by in found["growing"].items()) or "nothing"
    peak = f"the daemon's peak without the arena: {found['daemon_peak_mib']:.0f} MiB"
    print(f"{given.saves} saves in {found['seconds']:.0f} s; {peak}")
    print(f"grows: {grows}")
    if given.out:
        given.out.write_text(json.dumps(found, indent=1))
    return 1 if found["growing"] else 0


if __name__ == "__main__":
    sys.exit(main())
