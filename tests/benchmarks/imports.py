"""An import, and an export, beside `cp`: `python -m tests.benchmarks.imports [--gib N] [--rounds N] [--dir DIR]`.

All read a cold source and end when everything is on the disk. Import and export also read everything back, which is told
apart.
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

from holdfast_formats import naming
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.decisions import Decisions
from holdfast_service.daemon.copying.foreign_export import ExportTerms
from holdfast_service.storage import PosixTier
from holdfast_service.wiring.exports import ExportWork, converted
from holdfast_service.wiring.imports import Importer, WantedImport
from tests.benchmarks import disk

RATIO_MIN = 0.7  # of cp's speed, for writing
MEMORY_BYTES_MAX = 512 * 2**20
TENSOR_BYTES = 64 * 2**20
FILE_TENSORS = 16


class CopyRun(NamedTuple):
    """Seconds until all files were on the disk, and until they were read back and had their name; the peak of memory."""

    staged_s: float
    named_s: float
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


def run(act: str, source: Path, target: Path) -> CopyRun:
    """In a process of its own, whose memory is its own."""
    disk.drop_caches()
    command = [sys.executable, "-m", "tests.benchmarks.imports", "--child", act, str(source), str(target)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return CopyRun(**json.loads(done.stdout.splitlines()[-1]))


def child(act: str, source: Path, target: Path) -> None:
    """Import a directory into the root `target`, or export the root `source` as the directory `target`."""
    if act == "export":
        tier, work = PosixTier(source), ExportWork(PosixTier(target.parent), target.name, clock := Clock())
        converted(tier, naming.checkpoint_path("run", 0), ExportTerms("hf"), work)
    else:
        tier = PosixTier(target)
        catalog = Catalog.open(f"sqlite:///{target}/catalog.sqlite")
        decisions = Decisions(tier, catalog, None)
        clock = Clock()
        Importer(tier, decisions).bring(PosixTier(source), WantedImport("run", 0), clock)
    took = time.perf_counter() - clock.began
    print(json.dumps({"staged_s": clock.staged_s, "named_s": took, "memory_bytes": memory_peak()}))
    if act == "import":
        decisions.close()
        catalog.close()


def memory_peak() -> int:
    """The most memory that this process had at once; what its parent had before, `getrusage` would count in."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def compare(directory: Path, size: int, rounds: int) -> None:
    source, root, out = directory / "source", directory / "root", directory / "out"
    make(source, size)
    cps: list[float] = []
    runs: dict[str, list[CopyRun]] = {"import": [], "export": []}
    for _ in range(rounds):
        cps.append(copied(source, directory / "copy"))
        runs["import"].append(run("import", source, root))
        runs["export"].append(run("export", root, out))
        shutil.rmtree(root)
        shutil.rmtree(out)
    cp = statistics.median(cps)
    print(f"{size / 2**30:.1f} GiB, {rounds} rounds, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"{'':34}{'median s':>10}{'spread s':>10}{'of cp':>8}")
    print(f"{'cp and sync':34}{cp:10.2f}{max(cps) - min(cps):10.2f}{1:8.2f}")
    told: dict[str, float] = {"cp_s": cp}
    for act, made in runs.items():
        staged, named = ([r.staged_s for r in made], [r.named_s for r in made])
        for name, times in ((f"{act}, until all is on the disk", staged), (f"{act}, read back and named", named)):
            took = statistics.median(times)
            print(f"{name:34}{took:10.2f}{max(times) - min(times):10.2f}{cp / took:8.2f}")
        told |= {f"{act}_staged_s": statistics.median(staged), f"{act}_named_s": statistics.median(named)}
    memory = max(one.memory_bytes for made in runs.values() for one in made)
    print(f"memory of either: {memory / 2**20:.0f} MiB, at most {MEMORY_BYTES_MAX / 2**20:.0f} allowed")
    fast = all(cp / told[f"{act}_staged_s"] >= RATIO_MIN for act in runs)
    print(json.dumps({**told, "memory_bytes": memory, "met": fast and memory < MEMORY_BYTES_MAX}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", default=".")
    parser.add_argument("--child", nargs=3, metavar=("ACT", "SOURCE", "TARGET"))
    given = parser.parse_args()
    if given.child:
        child(given.child[0], Path(given.child[1]), Path(given.child[2]))
        return
    with tempfile.TemporaryDirectory(dir=given.dir) as name:
        compare(Path(name), int(given.gib * 2**30), given.rounds)


if __name__ == "__main__":
    main()
