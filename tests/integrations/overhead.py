"""What an adapter adds to a save: the time in its own call, less the time in `Checkpointer.save` within it.

    build/integrations/NAME/bin/python -m tests.integrations.overhead NAME --work DIRECTORY [arguments of its train.py]

runs the adapter's training script in this process, and prints one line: the number of saves, and the median, the 90th
percentile and the maximum in milliseconds. A wait for a commit, as at the last step, is a part of the call and not of the
adapter: the last save is left out. So are Ray and verl, whose saves are made in other processes, or always wait for that.
"""

from __future__ import annotations

import functools
import importlib
import os
import runpy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integrations.environments import stand_alone

RECORD = "RECORD"  # as in `recording`, which imports torch: some scripts prepare it first
# The calls of one save, and the script that makes them.
ADAPTERS: dict[str, tuple[str, tuple[tuple[str, str, tuple[str, ...]], ...]]] = {
    "transformers": (
        "tests.integrations.transformers.train",
        (("holdfast.integrations.trainers.runs", "TrainerRun", ("save",)),),
    ),
    "accelerate": (
        "tests.integrations.accelerate.train",
        (("holdfast.integrations.accelerate", "AcceleratorCheckpoints", ("save_state",)),),
    ),
    "deepspeed": (
        "tests.integrations.deepspeed.train",
        (("holdfast.integrations.deepspeed.engine", "AttachedEngine", ("save",)),),
    ),
    "dcp": (  # without `finish`, in which DCP waits for the commit
        "tests.integrations.dcp.train",
        (
            (
                "holdfast.integrations.dcp.writer",
                "HoldfastStorageWriter",
                ("set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data"),
            ),
        ),
    ),
    "torchtitan": (
        "tests.integrations.torchtitan.train",
        (("holdfast.integrations.torchtitan", "HoldfastCheckpointManager", ("_save",)),),
    ),
    "lightning": (
        "tests.integrations.lightning.train",
        (("holdfast.integrations.lightning.training", "LightningRun", ("save",)),),
    ),
    "megatron": (
        "tests.integrations.megatron.train",
        (("holdfast.integrations.megatron.checkpoints", "MegatronCheckpoints", ("save",)),),
    ),
}


class Spans:
    """Seconds of every save: in the adapter's calls since the save before, and within them in the core's."""

    def __init__(self) -> None:
        self.adapter: list[float] = []
        self._outside, self._inside = 0.0, 0.0
        self._depth = 0

    def outer(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call of the adapter."""

        @functools.wraps(call)
        def timed(*given: Any, **named: Any) -> Any:
            self._depth += 1
            began = time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                self._depth -= 1
                if not self._depth:
                    self._outside += time.perf_counter() - began
                    self._note()

        return timed

    def inner(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The core's `save`."""

        @functools.wraps(call)
        def timed(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                if self._depth:
                    self._inside += time.perf_counter() - began

        return timed

    def _note(self) -> None:
        if self._inside:  # the last of a save's calls: it has handed the state over
            self.adapter.append(self._outside - self._inside)
            self._outside = self._inside = 0.0


def main() -> None:
    name = sys.argv.pop(1)
    script, calls = ADAPTERS[name]
    work = Path(sys.argv[sys.argv.index("--work") + 1])
    work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault(RECORD, str(work / "record-0.jsonl"))
    if name in ("deepspeed", "torchtitan"):
        stand_alone()
    if name == "torchtitan":
        importlib.import_module("tests.integrations.torchtitan.tiny")
    from holdfast.checkpointer import Checkpointer

    spans = Spans()
    Checkpointer.save = spans.inner(Checkpointer.save)  # type: ignore[method-assign]
    for module, owner, methods in calls:
        kind = getattr(importlib.import_module(module), owner)
        for method in methods:
            setattr(kind, method, spans.outer(getattr(kind, method)))
    try:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    finally:
        taken = sorted(1e3 * one for one in spans.adapter[:-1])
        if taken:
            p90 = taken[int(0.9 * (len(taken) - 1))]
            print(
                f"{name}: {len(taken)} saves, ms: median {statistics.median(taken):.2f}, p90 {p90:.2f}, max {taken[-1]:.2f}"
            )


if __name__ == "__main__":
    main()
