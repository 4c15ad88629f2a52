"""Imports and exports beside `cp`: `python -m benchmarks.imports [--gib N] [--rounds N] [--dir DIR]`.

All read a cold source and end when everything is on the disk. What is imported or exported is also read back, which is told
apart. Prints a table and a JSON line, with the machine's load: times on a machine that does other work say little.
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

from benchmarks import disk
from holdfast_formats import naming
from holdfast_formats.rest.jobs import ExportTerms
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.control import Control
from holdfast_service.storage import PosixTier, stored_in
from holdfast_service.wings.convert.export_jobs import ExportWork, converted
from holdfast_service.wings.convert.import_jobs import Importer
from tests.job_requests import an_import

RATIO_MIN = 0.7  # of cp's speed, for writing
MEMORY_BYTES_MAX = 512 * 2**20
TENSOR_BYTES = 64 * 2**20
FILE_TENSORS = 16
EXPORTS = ("hf", "dcp")


class CopyRun(NamedTuple):
    """Seconds until all files were on the disk, and until all was read back and had its name; the peak of memory."""

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


def measured(act: str, source: Path, target: Path) -> CopyRun:
    """In a process of its own, whose memory is its own."""
    disk.drop_caches()
    command = [sys.executable, "-m", "benchmarks.imports", "--child", act, str(source), str(target)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return CopyRun(**json.loads(done.stdout.splitlines()[-1]))


def child(act: str, source: Path, target: Path) -> None:
    clock = Clock()
    if act == "import":
        tier = PosixTier(target)
        catalog = Catalog.open(f"sqlite:///{target}/catalog.sqlite")
        control = Control(stored_in(tier), catalog, None)
        clock = Clock()
        Importer(control).bring(PosixTier(source), an_import("run", 0), clock)
        took = time.perf_counter() - clock.began
        control.close()
        catalog.close()
    else:
        place = PosixTier(target.parent)
        clock = Clock()
        work = ExportWork(place, target.name, clock)
        converted(PosixTier(source), naming.checkpoint_path("run", 0), ExportTerms(form=act), work)
        took = time.perf_counter() - clock.began
    print(json.dumps({"staged_s": clock.staged_s, "named_s": took, "memory_bytes": memory_peak()}))


def memory_peak() -> int:
    """The most memory that this process had at once; what its parent had before, `getrusage` would count in."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def one_round(directory: Path, source: Path) -> tuple[float, dict[str, CopyRun]]:
    """What `cp` takes, and what each act takes. There is room for three copies at once."""
    root, out = directory / "root", directory / "out"
    cp = copied(source, directory / "copy")
    runs = {"import": measured("import", source, root)}
    for kind in EXPORTS:
        runs[kind] = measured(kind, root, out)
        shutil.rmtree(out)
    shutil.rmtree(root)
    return cp, runs


def compare(directory: Path, size: int, rounds: int) -> None:
    source = directory / "source"
    make(source, size)
    found = [one_round(directory, source) for _ in range(rounds)]
    cps = [cp for cp, _ in found]
    print(f"{size / 2**30:.1f} GiB, {rounds} rounds, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"{'':38}{'median s':>10}{'spread s':>10}{'of cp':>8}{'lowest':>8}{'MiB':>6}")
    print(f"{'cp and sync':38}{statistics.median(cps):10.2f}{max(cps) - min(cps):10.2f}")
    told: dict[str, float | bool] = {"cp_s": statistics.median(cps)}
    met = True
    for act in ("import", *EXPORTS):
        runs = [each[act] for _, each in found]
        memory = max(run.memory_bytes for run in runs)
        for what, times in (
            ("all is on the disk", [run.staged_s for run in runs]),
            ("read back and named", [run.named_s for run in runs]),
        ):
            ratios = [cp / took for cp, took in zip(cps, times, strict=True)]
            line = f"{f'{act}, until {what}':38}{statistics.median(times):10.2f}{max(times) - min(times):10.2f}"
            print(f"{line}{statistics.median(ratios):8.2f}{min(ratios):8.2f}{memory / 2**20:6.0f}")
            told[f"{act}, {what}"] = round(statistics.median(ratios), 3)
            if what == "all is on the disk":
                met = met and statistics.median(ratios) >= RATIO_MIN and memory < MEMORY_BYTES_MAX
    print(json.dumps({**told, "met": met}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", default=".")
    parser.add_argument("--child", nargs=3, metavar=("ACT", "SOURCE", "TARGET"))
    given = parser.parse_args()
    if given.child:
        act, *places = given.child
        child(act, *map(Path, places))
        return
    with tempfile.TemporaryDirectory(dir=given.dir) as name:
        compare(Path(name), int(given.gib * 2**30), given.rounds)


if __name__ == "__main__":
    main()
