"""Merges beside `cp`: `python -m benchmarks.merging [--gib 20] [--methods linear,ties] [--models N] [--rounds N]`.

A model of so many GiB, in BF16, is the base; `--models` others are near it. Every round copies the base with `cp`, and then
merges by each method, all with nothing cached, until everything is on the disk. `cp` reads and writes a GiB for each of the
model; a merge writes as much, and reads that of every source. So there are two ratios:

of cp, written   the speed at which the result is written, beside that of `cp`
of cp, moved     the same of all bytes that are read and written, each source once

Results are also read back, which is told apart. A merge runs in a process of its own, whose peak of memory and processor
seconds are told. Ends with a JSON line. Times on a machine that does other work say little.
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

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from benchmarks import disk
from benchmarks.imports import Clock, copied, memory_peak
from holdfast_formats import naming
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.control import Control
from holdfast_service.daemon.copying.progress import Quiet
from holdfast_service.storage import PosixTier, libc, stored_in
from holdfast_service.wings.convert.import_jobs import Importer
from holdfast_service.wings.merge.merge_jobs import Merger
from tests.job_requests import a_merge, an_import

RATIO_MIN = 0.6  # of cp's speed, for writing
MEMORY_BYTES_MAX = 512 * 2**20
METHODS = ("linear", "task_arithmetic", "slerp", "ties", "dare_linear", "breadcrumbs", "della_linear")
OTHERS = {"slerp": 1, "nearswap": 1, "arcee_fusion": 1, "nuslerp": 2}
WITHOUT_A_BASE = ("linear", "karcher")
PARAMETERS = {  # a weight that is not 1: a plain mean is only sums
    **dict.fromkeys(("linear", "task_arithmetic", "nuslerp", "multislerp"), "{weight: 0.4}"),
    **dict.fromkeys(("slerp", "nearswap"), "{t: 0.4}"),
    **dict.fromkeys(("karcher", "model_stock", "arcee_fusion"), "{}"),
    "sce": "{select_topk: 0.3}",
}
COLUMNS, TENSOR_BYTES, FILE_TENSORS = 4096, 128 * 2**20, 16
PATTERNS = 3  # different tensors; the others have the same values
BASE = "base"


class MergeRun(NamedTuple):
    """Seconds until all files were on the disk, and until all was read back and had its name; peak memory and CPU time."""

    staged_s: float
    named_s: float
    memory_bytes: int
    cpu_s: float


def sources_of(method: str, models: int) -> list[str]:
    """The runs that a method reads; some take a fixed number of models besides the base."""
    return [BASE, *(f"model{number}" for number in range(OTHERS.get(method, models)))]


def recipe_of(method: str, models: int) -> str:
    base, *others = sources_of(method, models)
    listed, head = (others, f"base_model: {base}@0\n") if method not in WITHOUT_A_BASE else ([base, *others], "")
    named = "".join(f"  - {{model: {one}@0}}\n" for one in listed)
    shared = PARAMETERS.get(method, "{weight: 0.4, density: 0.6}")
    return f"merge_method: {method}\n{head}models:\n{named}parameters: {shared}\n"


def make(directory: Path, name: str, size: int) -> None:
    """A model of so many bytes in numbered files."""
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    rows, count = TENSOR_BYTES // 2 // COLUMNS, max(size // TENSOR_BYTES, 1)
    patterns = [pattern(name, number, rows) for number in range(min(PATTERNS, count))]
    files = -(-count // FILE_TENSORS)
    for number in range(files):
        here = range(number * FILE_TENSORS, min((number + 1) * FILE_TENSORS, count))
        arrays = {f"model.layers.{i}.mlp.up_proj.weight": patterns[i % PATTERNS] for i in here}
        save_file(arrays, directory / f"model-{number + 1:05}-of-{files:05}.safetensors", metadata={"format": "pt"})


def pattern(name: str, number: int, rows: int) -> NDArray[np.float32]:
    base = np.random.default_rng(number).standard_normal((rows, COLUMNS), np.float32)
    if name != BASE:
        chance = np.random.default_rng([number, *name.encode()])
        base += np.float32(0.05) * chance.standard_normal(base.shape, np.float32)
    return base.astype(ml_dtypes.bfloat16)


def measured(method: str, root: Path, models: int) -> MergeRun:
    disk.drop_caches()
    command = [sys.executable, "-m", "benchmarks.merging", "--child", method, str(root), str(models)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    shutil.rmtree(root / "merged")
    return MergeRun(**json.loads(done.stdout.splitlines()[-1]))


def child(method: str, root: Path, models: int) -> None:
    libc.give_memory_back()  # as the daemon does
    tier = PosixTier(root)
    catalog = Catalog.open(f"sqlite:///{root}/catalog.sqlite")
    control = Control(stored_in(tier), catalog, None)
    merger = Merger(control)
    clock, spent = Clock(), time.process_time()

    def refuse(path: str) -> PosixTier:
        raise AssertionError(path)

    merger.merge(a_merge("merged", 0, recipe_of(method, models)), refuse, clock)
    told = clock.staged_s, time.perf_counter() - clock.began, memory_peak(), time.process_time() - spent
    control.close()
    catalog.close()
    print(json.dumps(MergeRun(*told)._asdict()))


def prepare(directory: Path, size: int, models: int) -> Path:
    """A root with the base and the models as runs."""
    root = directory / "root"
    root.mkdir()
    tier = PosixTier(root)
    catalog = Catalog.open(f"sqlite:///{root}/catalog.sqlite")
    control = Control(stored_in(tier), catalog, None)
    for name in sources_of("", models):
        make(directory / name, name, size)
        Importer(control).bring(PosixTier(directory / name), an_import(name, 0), Quiet())
        shutil.rmtree(directory / name)
    control.close()
    catalog.close()
    return root


def compare(directory: Path, size: int, methods: list[str], models: int, rounds: int) -> None:
    root = prepare(directory, size, models)
    source = root / naming.checkpoint_path(BASE, 0)
    cps: list[float] = []
    runs: dict[str, list[MergeRun]] = {method: [] for method in methods}
    for _ in range(rounds):
        cps.append(copied(source, directory / "copy"))
        for method in methods:
            runs[method].append(measured(method, root, models))
    print(f"{size / 2**30:.1f} GiB, {rounds} rounds, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    heads = (("sources", 8), ("median s", 10), ("spread s", 10), ("written", 9), ("moved", 7), ("named s", 9), ("CPU s", 7))
    print(" " * 22 + "".join(f"{head:>{width}}" for head, width in heads) + f"{'MiB':>6}")
    print(f"{'cp and sync':22}{1:8}{statistics.median(cps):10.2f}{max(cps) - min(cps):10.2f}{1:9}{1:7}")
    told: dict[str, float | bool] = {"cp_s": statistics.median(cps)}
    met = True
    for method, found in runs.items():
        sources = len(sources_of(method, models))
        took = [run.staged_s for run in found]
        written = statistics.median(cp / one for cp, one in zip(cps, took, strict=True))
        moved = written * (sources + 1) / 2
        memory = max(run.memory_bytes for run in found)
        named, cpu = (statistics.median(column) for column in ([r.named_s for r in found], [r.cpu_s for r in found]))
        print(
            f"{method:22}{sources:8}{statistics.median(took):10.2f}{max(took) - min(took):10.2f}{written:9.2f}{moved:7.2f}"
            f"{named:9.2f}{cpu:7.1f}{memory / 2**20:6.0f}"
        )
        told |= {f"{method}, written": round(written, 3), f"{method}, moved": round(moved, 3)}
        met = met and written >= RATIO_MIN and memory < MEMORY_BYTES_MAX
    print(json.dumps({**told, "met": met}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2, help="of each model, and of the result")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--models", type=int, default=2, help="besides the base")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", default=".")
    parser.add_argument("--child", nargs=3, metavar=("METHOD", "ROOT", "MODELS"))
    given = parser.parse_args()
    if given.child:
        child(given.child[0], Path(given.child[1]), int(given.child[2]))
        return
    size = int(given.gib * 2**30)
    needed = size * (given.models + 2)  # the sources, and a result or a copy
    free = shutil.disk_usage(given.dir).free
    if free < needed:
        parser.error(f"{given.dir} has {free / 2**30:.0f} GiB free; all models need {needed / 2**30:.0f}")
    with tempfile.TemporaryDirectory(dir=given.dir) as name:
        compare(Path(name), size, given.methods.split(","), given.models, given.rounds)


if __name__ == "__main__":
    main()
