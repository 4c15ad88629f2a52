"""How long it takes to work out what every rank of a large layout holds, and to plan the reads of one node.

python -m benchmarks.plans

A hundred thousand tensors and 1 024 ranks: rules are chosen, every place in the mesh is worked out, every rank's share is
counted; then the tensors of the eight ranks of one node, and their reads. Each layout in a process of its own, with the
garbage collector off, unless `--collecting`. Exit status 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.disk.read_planner import WantedBox, plan
from holdfast_formats.layout import rules
from holdfast_formats.layout.elements import Specs
from holdfast_formats.layout.language import parse
from holdfast_formats.layout.rank_tensors import LayoutHoldings
from holdfast_formats.region import Shape
from tests.layouts import models
from tests.layouts.realistic import KEYS, manifest, nbytes

TENSORS = 100_000
NODE = 8  # ranks
EXPERTS = 128
SECONDS_MAX, BYTES_MAX = 5.0, 2 * 2**30
GIB = 2**30
TOP = Path(__file__).parents[1]
Found = TypeVar("Found")


class Case(NamedTuple):
    """A layout, and the model and group that it is a layout of."""

    layout: str
    model: str
    group: str


CASES = {
    "dense": Case("tp=8,pp=8,dp=16", "llama", "model"),
    "fsdp": Case("tp=8,pp=8,sharding=16:stage3", "llama", "model"),
    "fsdp-only": Case("sharding=1024:stage3", "llama", "model"),
    "optimizer": Case("tp=8,pp=8,sharding=16:stage1:flat:align=64", "llama", "optim"),
    "optimizer-whole": Case("tp=8,pp=8,sharding=16:stage1", "llama", "optim"),
    "experts": Case("tp=4,ep=16,etp=1,pp=8,sharding=32:stage1", "moe", "model"),
    "experts-stacked": Case("tp=4,ep=16,etp=1,pp=8,sharding=32:stage3,experts=stacked", "moe", "model"),
}


class Made(NamedTuple):
    """A checkpoint of so many tensors: the group's specs, its config, and its manifest."""

    specs: Specs
    config: dict[str, Any]
    manifest: Manifest


def make(case: Case, tensors: int) -> Made:
    """As many layers as it takes; of an optimizer, two moments and a step for each parameter."""
    model = _model(case.model, tensors // (3 if case.group == "optim" else 1))
    specs: dict[str, tuple[str, Shape]] = {}
    for name, tensor in model.tensors.items():
        if case.group == "optim":
            specs |= {f"{name}/{key}": ("F32", tensor.shape) for key in KEYS}
            specs[f"{name}/step"] = ("F32", ())
        else:
            specs[name] = ("BF16", tensor.shape)
    groups = {case.group: specs}
    return Made(specs, model.config, manifest(groups, nbytes(groups)))


def _model(name: str, tensors: int) -> models.Model:
    if name == "moe":
        return models.moe(max(tensors // (3 * EXPERTS + 9), 1), EXPERTS)
    return models.llama(max(tensors // 9, 1), hidden=4096, heads=32, kv_heads=8, vocabulary=128256)


class Clock:
    """Wall and CPU seconds of each phase, and of all."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self.wall = self.cpu = 0.0

    def time(self, phase: str, act: Callable[[], Found]) -> Found:
        wall, cpu = time.perf_counter(), time.process_time()
        found = act()
        self.phases[phase] = time.perf_counter() - wall
        self.wall += self.phases[phase]
        self.cpu += time.process_time() - cpu
        return found


def measure(case: Case, tensors: int, collecting: bool) -> dict[str, Any]:
    """Seconds by phase, and the peak of memory with all that was made before."""
    made = make(case, tensors)
    gc.collect()
    if not collecting:
        gc.disable()
    clock = Clock()
    layout = parse(case.layout)
    world = layout.mesh.world
    chosen = clock.time("choose", lambda: rules.choose(made.config, made.specs))
    holding = clock.time("holding", lambda: LayoutHoldings(layout, case.group, made.specs, chosen))
    shares = clock.time("share", lambda: [holding.share(rank) for rank in range(world)])
    held = clock.time("of", lambda: [holding.of(rank).tensors for rank in range(NODE)])
    wanted = [WantedBox(case.group, part.tensor, part.box) for rank in held for tensor in rank for part in tensor.parts]
    reads = clock.time("plan", lambda: plan(made.manifest, wanted))
    return {
        "tensors": len(made.specs),
        "ranks": world,
        "wall_s": clock.wall,
        "cpu_s": clock.cpu,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "phases_s": clock.phases,
        "held": sum(share.tensors for share in shares),
        "ratio": reads.ratio,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans", description=__doc__)
    parser.add_argument("--tensors", type=int, default=TENSORS)
    parser.add_argument("--only", choices=CASES, help="one of the layouts")
    parser.add_argument("--collecting", action="store_true", help="with the garbage collector running")
    parser.add_argument("--json", type=Path, help="where the numbers go")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # one case, in this process
    given = parser.parse_args()
    if given.here:
        print(json.dumps(measure(CASES[given.only], given.tensors, given.collecting)))
        return 0
    found = {name: _apart(name, given) for name in ([given.only] if given.only else CASES)}
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    return 1 if any(each["missed"] for each in found.values()) else 0


def _apart(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """One case in a process of its own, and its line."""
    command = [sys.executable, "-m", "benchmarks.plans", "--here", "--only", name, "--tensors", str(given.tensors)]
    done = subprocess.run([*command, *["--collecting"] * given.collecting], cwd=TOP, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    found["missed"] = found["wall_s"] >= SECONDS_MAX or found["peak_bytes"] >= BYTES_MAX
    phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in found["phases_s"].items())
    print(
        f"{name:16} {CASES[name].layout:56} {found['tensors']} tensors, {found['ranks']} ranks: {found['wall_s']:.2f} s "
        f"({found['cpu_s']:.2f} s CPU; {phases}), {found['peak_bytes'] / GIB:.2f} GiB{' MISSED' * found['missed']}",
        flush=True,
    )
    return found


if __name__ == "__main__":
    sys.exit(main())
