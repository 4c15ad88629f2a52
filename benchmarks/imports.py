"""Imports and exports beside `cp`: `python -m benchmarks.imports [--gib N] [--rounds N] [--kinds K,…] [--dir DIR]`.

Imports checkpoints of these kinds (`benchmarks.import_sources`; `orbax` needs Orbax), one after the other, and exports what
became of `safetensors`, which is the only kind by default. All read a cold source and end when everything is on the disk.
What is imported or exported is also read back, which is told apart. Prints tables and a JSON line for each kind, with the
machine's load: times on a machine that does other work say little.
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
IMPORT_RATIO_MIN = 0.6  # until an import has ended
MEMORY_BYTES_MAX = 512 * 2**20
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


def one_round(directory: Path, source: Path, exports: tuple[str, ...]) -> tuple[float, dict[str, CopyRun]]:
    """What `cp` takes, and what each act takes. There is room for three copies at once."""
    root, out = directory / "root", directory / "out"
    cp = copied(source, directory / "copy")
    runs = {"import": measured("import", source, root)}
    for kind in exports:
        runs[kind] = measured(kind, root, out)
        shutil.rmtree(out)
    shutil.rmtree(root)
    return cp, runs


def compare(directory: Path, kind: str, size: int, rounds: int) -> None:
    source, exports = directory / "source", EXPORTS if kind == "safetensors" else ()
    subprocess.run([sys.executable, "-m", "benchmarks.import_sources", kind, str(source), str(size)], check=True)
    found = [one_round(directory, source, exports) for _ in range(rounds)]
    cps = [cp for cp, _ in found]
    made = sum(path.stat().st_size for path in disk.files(source))
    shutil.rmtree(source)
    print(f"{kind}: {made / 2**30:.1f} GiB, {rounds} rounds, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"{'':38}{'median s':>10}{'spread s':>10}{'of cp':>8}{'lowest':>8}{'MiB':>6}")
    print(f"{'cp and sync':38}{statistics.median(cps):10.2f}{max(cps) - min(cps):10.2f}")
    told: dict[str, float | bool | str] = {"kind": kind, "cp_s": statistics.median(cps)}
    met = True
    for act in ("import", *exports):
        runs = [each[act] for _, each in found]
        memory = max(run.memory_bytes for run in runs)
        for what, times, least in (
            ("all is on the disk", [run.staged_s for run in runs], RATIO_MIN),
            ("read back and named", [run.named_s for run in runs], IMPORT_RATIO_MIN if act == "import" else 0),
        ):
            ratios = [cp / took for cp, took in zip(cps, times, strict=True)]
            line = f"{f'{act}, until {what}':38}{statistics.median(times):10.2f}{max(times) - min(times):10.2f}"
            print(f"{line}{statistics.median(ratios):8.2f}{min(ratios):8.2f}{memory / 2**20:6.0f}")
            told[f"{act}, {what}"] = round(statistics.median(ratios), 3)
            met = met and statistics.median(ratios) >= least and memory < MEMORY_BYTES_MAX
    print(json.dumps({**told, "met": met}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", default="safetensors", help="kinds of benchmarks.import_sources, with commas between")
    parser.add_argument("--dir", default=".")
    parser.add_argument("--child", nargs=3, metavar=("ACT", "SOURCE", "TARGET"))
    given = parser.parse_args()
    if given.child:
        act, *places = given.child
        child(act, *map(Path, places))
        return
    for kind in given.kinds.split(","):
        with tempfile.TemporaryDirectory(dir=given.dir) as name:
            compare(Path(name).resolve(), kind, int(given.gib * 2**30), given.rounds)


if __name__ == "__main__":
    main()
