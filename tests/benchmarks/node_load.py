"""Ranks of one machine restore one replicated state: read together by their daemon, or by each rank for itself.

python -m tests.benchmarks.node_load --ranks 2 4 --bytes 1073741824

Both ways alternate in one run, over the same processes, tensors and files. The time is that of the slowest rank, from the
moment all are told to begin; processor seconds are those of all ranks and the daemon. `--cold` drops the files from the
page cache before every restore.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from holdfast import Checkpointer
from holdfast_formats import naming
from tests.checkpoints import forget
from tests.daemons import RunningDaemon, running

MIB = 2**20
TENSORS = 64
WAYS = ("together", "alone")
_TICKS = os.sysconf("SC_CLK_TCK")


def state(size: int, fill: float) -> dict[str, dict[str, torch.Tensor]]:
    """So many bytes in `TENSORS` tensors, every one of another value."""
    return {"model": {f"layer.{i}.weight": torch.full((size // TENSORS // 4,), fill * (i + 1)) for i in range(TENSORS)}}


def work(root: Path, size: int) -> None:
    """A rank: restores as often as it is told, checks what came back, and says how it went."""
    live = state(size, 0.0)
    for line in sys.stdin:
        told = json.loads(line)
        os.environ |= told["environment"]
        for tensor in live["model"].values():
            tensor.zero_()
        with Checkpointer("r", live, at=root) as checkpointer:
            print("ready", flush=True)
            assert sys.stdin.readline() == "go\n"
            began = time.monotonic()
            assert checkpointer.restore(1, groups=["model"]) == 1
            seconds = time.monotonic() - began
            report = checkpointer.last_restore
        assert report is not None
        assert all(bool((t == float(i + 1)).all()) for i, t in enumerate(live["model"].values())), "the values are wrong"
        found = {"seconds": seconds, "node_bytes": report.node_bytes, "own_bytes": report.own_bytes}
        print(json.dumps(found), flush=True)


def processor_s(pid: int) -> float:
    """Processor time of a process, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


class Ranks:
    """Rank processes of one machine, which live as long as the block."""

    def __init__(self, count: int, daemon: RunningDaemon, size: int) -> None:
        self._count, self._daemon = count, daemon
        command = [sys.executable, "-m", __spec__.name, "--work", str(daemon.root), "--bytes", str(size)]
        limited = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=limited)
            for _ in range(count)
        ]

    def restore(self, way: str, number: int) -> dict[str, Any]:
        """One restore by all; what they report, the slowest one's seconds, and the processor time of all."""
        for rank, process in enumerate(self._processes):
            peers = self._count if way == "together" else 1
            environment = {"RANK": str(rank), "WORLD_SIZE": str(self._count), "LOCAL_WORLD_SIZE": str(peers)}
            self._tell(
                process, json.dumps({"environment": {**environment, "HOLDFAST_LAUNCH": f"{way}-{self._count}-{number}"}})
            )
        for process in self._processes:
            assert self._hear(process) == "ready"
        pids = [self._daemon.process.pid, *(process.pid for process in self._processes)]
        before = sum(map(processor_s, pids))
        for process in self._processes:
            self._tell(process, "go")
        reports = [json.loads(self._hear(process)) for process in self._processes]
        used = sum(map(processor_s, pids)) - before
        return {"seconds": max(report["seconds"] for report in reports), "processor_s": used, "reports": reports}

    def end(self) -> None:
        for process in self._processes:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.wait(60)
            process.stdout.close()

    @staticmethod
    def _tell(process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()

    @staticmethod
    def _hear(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        assert line, f"a rank ended with status {process.wait()}"
        return line


@contextmanager
def saved(root: Path, size: int) -> Iterator[RunningDaemon]:
    """A daemon with the state committed, in no slot any more."""
    with running(root, "--log-level", "warning") as daemon:
        with Checkpointer("r", state(size, 1.0), at=daemon.socket) as checkpointer:
            checkpointer.save(1, wait="durable")
        yield daemon


def measure(daemon: RunningDaemon, count: int, size: int, rounds: int, cold: bool) -> dict[str, Any]:
    """Both ways in turn, so many times, after one of each that does not count; and what that comes to."""
    ranks = Ranks(count, daemon, size)
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    try:
        for number in range(rounds + 1):
            for way in WAYS if number % 2 else reversed(WAYS):
                if cold:
                    forget(daemon.root / naming.checkpoint_path("r", 1))
                runs[way].append(ranks.restore(way, number))
    finally:
        ranks.end()
    return {"ranks": count, "bytes": size, "cold": cold, **summary({way: found[1:] for way, found in runs.items()})}


def summary(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Medians of each way, and of the ratios alone / together of restores next to each other, with their spread."""
    found: dict[str, Any] = {}
    for way in WAYS:
        for what in ("seconds", "processor_s"):
            found[f"{way}_{what}"] = statistics.median(run[what] for run in runs[way])
        reports = [report for run in runs[way] for report in run["reports"]]
        found[f"{way}_own_bytes"] = max(report["own_bytes"] for report in reports)
    ratios = sorted(a["seconds"] / t["seconds"] for a, t in zip(runs["alone"], runs["together"], strict=True))
    found |= {"ratio": statistics.median(ratios), "ratio_least": ratios[0], "ratio_most": ratios[-1], "runs": dict(runs)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.node_load", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--bytes", type=int, default=2**30, help="of the state, which every rank has whole (default: 1 GiB)")
    parser.add_argument("--rounds", type=int, default=5, help="restores of each way that count (default: 5)")
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before every restore")
    parser.add_argument("--at", type=Path, help="a directory on the disk to use (default: the system's for temporary files)")
    parser.add_argument("--out", type=Path, help="where the numbers go, as JSON")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work, given.bytes)
        return 0
    found = []
    with (
        tempfile.TemporaryDirectory(dir=given.at, prefix="node-load-") as directory,
        saved(Path(directory) / "root", given.bytes) as daemon,
    ):
        found = [measure(daemon, count, given.bytes, given.rounds, given.cold) for count in given.ranks]
    titles = ("ranks", "MiB", "together s", "alone s", "alone / together", "cpu together s", "alone s")
    print(" ".join(f"{title:>{width}}" for title, width in zip(titles, (5, 6, 11, 8, 24, 15, 8), strict=True)))
    for row in found:
        ratio = f"{row['ratio']:.2f} ({row['ratio_least']:.2f} to {row['ratio_most']:.2f})"
        times = f"{row['together_seconds']:11.3f} {row['alone_seconds']:8.3f} {ratio:>24}"
        cpu = f"{row['together_processor_s']:15.2f} {row['alone_processor_s']:8.2f}"
        print(f"{row['ranks']:5} {row['bytes'] // MIB:6} {times} {cpu}")
    if given.out:
        given.out.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
