"""An import beside `cp` of the same directory: `python -m tests.benchmarks.imports [--gib N] [--rounds N] [--dir DIR]`.

Both read a cold source and end when everything is on the disk. The import also reads everything back, which is told apart.
Prints a table and a JSON line, with the machine's load: times on a machine that does other work say little.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import save_file

from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.decisions import Decisions
from holdfast_service.storage import PosixTier
from holdfast_service.wiring.imports import Importer, WantedImport
from tests.benchmarks import disk

RATIO_MIN = 0.7  # of cp's speed, for writing
MEMORY_BYTES_MAX = 512 * 2**20
TENSOR_BYTES = 64 * 2**20
FILE_TENSORS = 16


class ImportRun(NamedTuple):
    """Seconds until all files were on the disk, and until the checkpoint was read back and committed; the peak of memory."""

    staged_s: float
    committed_s: float
    memory_bytes: int


class Clock:
    """Notes when half of the bytes are done: those of the files, of which as many are read back."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.staged_s = 0.0

    def report(self, done_bytes: int, total_bytes: int) -> None:
        if not self.staged_s and 2 * done_bytes >= total_bytes:
            self.staged_s = time.perf_counter() - self.began


def make(directory: Path, size: int) -> None:
    """A model of so many bytes in numbered files, whose tensors are of two types and stand at odd places."""
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    rng, count = np.random.default_rng(1), max(size // TENSOR_BYTES, 1)
    files = -(-count // FILE_TENSORS)
    for number in range(files):
        here = range(number * FILE_TENSORS, min((number + 1) * FILE_TENSORS, count))
        bits = {f"layers.{i}.weight": rng.integers(0, 2**32, (TENSOR_BYTES // 4096, 1024), np.uint32) for i in here}
        arrays = {name: array.view(np.float16 if "1" in name else np.float32) for name, array in bits.items()}
        save_file(arrays, directory / f"model-{number + 1:05}-of-{files:05}.safetensors", metadata={"format": "pt"})


def copied(source: Path, target: Path) -> float:
    disk.drop_caches()
    began = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    disk.sync_tree(target)
    took = time.perf_counter() - began
    shutil.rmtree(target)
    return took


def imported(source: Path, root: Path) -> ImportRun:
    """In a process of its own, whose memory is its own."""
    disk.drop_caches()
    command = [sys.executable, "-m", "tests.benchmarks.imports", "--child", str(source), str(root)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    shutil.rmtree(root)
    return ImportRun(**json.loads(done.stdout.splitlines()[-1]))


def child(source: Path, root: Path) -> None:
    tier = PosixTier(root)
    catalog = Catalog.open(f"sqlite:///{root}/catalog.sqlite")
    decisions = Decisions(tier, catalog, None)
    clock = Clock()
    Importer(tier, decisions).bring(PosixTier(source), WantedImport("run", 0), clock)
    took = time.perf_counter() - clock.began
    decisions.close()
    catalog.close()
    print(json.dumps({"staged_s": clock.staged_s, "committed_s": took, "memory_bytes": memory_peak()}))


def memory_peak() -> int:
    """The most memory that this process had at once; what its parent had before, `getrusage` would count in."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def compare(directory: Path, size: int, rounds: int) -> None:
    source = directory / "source"
    make(source, size)
    cps, runs = [], []
    for _ in range(rounds):
        cps.append(copied(source, directory / "copy"))
        runs.append(imported(source, directory / "root"))
    cp = statistics.median(cps)
    staged, committed = (
        statistics.median(times) for times in zip(*((r.staged_s, r.committed_s) for r in runs), strict=True)
    )
    memory = max(run.memory_bytes for run in runs)
    print(f"{size / 2**30:.1f} GiB, {rounds} rounds, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"{'':34}{'median s':>10}{'spread s':>10}{'of cp':>8}")
    for name, took, spread in (
        ("cp and sync", cp, max(cps) - min(cps)),
        ("import, until all is on the disk", staged, max(r.staged_s for r in runs) - min(r.staged_s for r in runs)),
        ("import, read back and committed", committed, max(r.committed_s for r in runs) - min(r.committed_s for r in runs)),
    ):
        print(f"{name:34}{took:10.2f}{spread:10.2f}{cp / took:8.2f}")
    print(f"memory of the import: {memory / 2**20:.0f} MiB, at most {MEMORY_BYTES_MAX / 2**20:.0f} allowed")
    told = {"cp_s": cp, "staged_s": staged, "committed_s": committed, "memory_bytes": memory}
    print(json.dumps({**told, "met": cp / staged >= RATIO_MIN and memory < MEMORY_BYTES_MAX}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", default=".")
    parser.add_argument("--child", nargs=2, metavar=("SOURCE", "ROOT"))
    given = parser.parse_args()
    if given.child:
        child(Path(given.child[0]), Path(given.child[1]))
        return
    with tempfile.TemporaryDirectory(dir=given.dir) as name:
        compare(Path(name), int(given.gib * 2**30), given.rounds)


if __name__ == "__main__":
    main()
