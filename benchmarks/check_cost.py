"""What the restore check costs beside plainly reading everything back: `python -m benchmarks.check_cost [MIB]`.

Prints a table and a JSON line: medians and spreads over some checks of one checkpoint, in the page cache and from the disk.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from holdfast_files.opened import open_checkpoint
from holdfast_formats import naming
from holdfast_service.daemon.checking import layout_trials
from holdfast_service.daemon.checking.verifier import examine
from holdfast_service.storage import PosixTier
from tests.checkpoints import build

ROUNDS = 5
TENSORS = 200


def measured(act: Callable[[], object]) -> list[float]:
    """Seconds of each of some calls."""
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return times


def main() -> None:
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 512
    rng = np.random.default_rng(1)
    with tempfile.TemporaryDirectory(dir=".") as name:
        root = Path(name)
        rows = size * 2**20 // TENSORS // 4096
        arrays = {f"layers.{i}.weight": rng.standard_normal((rows, 1024), np.float32) for i in range(TENSORS)}
        path = root / naming.checkpoint_path("r", 1)
        build(path, {"model": arrays}, run="r", step=1, file_bytes_max=2**30, extent_bytes=2**18)
        tier, directory = PosixTier(root), naming.checkpoint_path("r", 1)
        made = open_checkpoint(tier, directory).manifest
        parts = {
            "read back and prove": measured(lambda: examine(tier, directory)),
            "other layouts": measured(lambda: layout_trials.LayoutTrials(tier, directory).result(made)),
            "compare with the one before": measured(
                lambda: layout_trials.identical(made, open_checkpoint(tier, directory).manifest)
            ),
        }
    whole = statistics.median(parts["read back and prove"])
    print(f"{made.bytes / 2**20:.0f} MiB, {TENSORS} tensors, {ROUNDS} rounds")
    print(f"{'part':30} {'median s':>9} {'spread s':>9} {'of reading':>10}")
    for part, times in parts.items():
        median, spread = statistics.median(times), max(times) - min(times)
        print(f"{part:30} {median:9.3f} {spread:9.3f} {median / whole:10.1%}")
    print(json.dumps({part: {"median_s": statistics.median(times)} for part, times in parts.items()}))


if __name__ == "__main__":
    main()
