"""How long one node takes to plan a save of a large world, from the declarations of all nodes, and how well that balances.

python -m benchmarks.joint_plans [--only NAME]

`moe`: 100 000 tensors on 16 384 ranks, by pipeline, expert, tensor and data parallelism. `fsdp` and `hsdp`: a dense model
with its optimizer, each tensor cut over all ranks, or over those of a group. `first` is from the declarations' bytes to the
plan with what this node writes; `next` is the plan of a save after it; both without what ranks say besides. Each case runs
in a process of its own. Exit status 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zstandard

from holdfast_formats.region import Box, whole
from holdfast_formats.staging import declaration
from holdfast_formats.staging.declaration import FragmentColumns, HeldTensor
from holdfast_formats.staging.part import DecodedPart
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.cluster.saving import share_planner
from holdfast_service.wiring import gc_tuning

NODE = 8  # ranks
FIRST_S, NEXT_S, BALANCE = 5.0, 0.05, 1.05  # seconds of processor, then of the clock
GIB = 2**30
TOP = Path(__file__).parents[1]
STATES = ("param", "exp_avg", "exp_avg_sq")
FORMS = ((16384, 16384), (1024, 16384), (16384,), (53248, 16384), (16384, 53248))


class Case(NamedTuple):
    """So many ranks and tensors. `group`: the ranks over which a tensor is cut; 0 for the mixture of experts."""

    world: int
    tensors: int
    group: int


CASES = {
    "moe 16384": Case(16384, 100_000, 0),
    "moe 2048": Case(2048, 100_000, 0),
    "fsdp 256": Case(256, 3_400, 256),
    "fsdp 2048": Case(2048, 3_400, 2048),
    "hsdp 2048/256": Case(2048, 3_400, 256),
    "hsdp 16384/256": Case(16384, 3_400, 256),
}

Held = list[tuple[HeldTensor, Box]]


def dense(case: Case, rank: int) -> Held:
    """Each tensor in chunks of its first dimension over the ranks of a group."""
    parts, part = case.group, rank % case.group
    found = []
    for number in range(case.tensors):
        form = FORMS[number // len(STATES) % len(FORMS)]
        size = -(-form[0] // parts)
        low, high = min(part * size, form[0]), min((part + 1) * size, form[0])
        spec = TensorSpec("model", f"layers.{number // 27}.{number % 27}.weight", "F32", form)
        found.append((HeldTensor(spec, "fsdp=Shard(dim=0)"), Box((low, *(0 for _ in form[1:])), (high - low, *form[1:]))))
    return found


def experts(case: Case, rank: int) -> Held:
    """Of 16 pipeline stages: 64 experts a layer, two ranks of tensor parallelism, and data parallelism over the rest."""
    stages, ep, tp = 16, 64, 2
    stage, of_stage = divmod(rank, case.world // stages)
    expert, part = of_stage // tp % ep, of_stage % tp
    layers = case.tensors // stages // (3 * ep + 6) + 1
    found = []
    for layer in range(stage * layers, (stage + 1) * layers):
        for name in ("gate", "up", "down"):
            spec = TensorSpec("model", f"layers.{layer}.experts.{expert}.{name}.weight", "BF16", (2048, 7168))
            found.append((HeldTensor(spec, "tp=Shard(dim=0)"), Box((part * 1024, 0), (1024, 7168))))
        for number in range(5):
            spec = TensorSpec("model", f"layers.{layer}.attention.{number}.weight", "BF16", (7168, 1536))
            found.append((HeldTensor(spec, "tp=Shard(dim=1)"), Box((0, part * 768), (7168, 768))))
        norm = TensorSpec("model", f"layers.{layer}.norm.weight", "BF16", (7168,))
        found.append((HeldTensor(norm, "Replicate()"), whole((7168,))))
    return found


def encoded(case: Case) -> Iterator[bytes]:
    """The declarations of all nodes."""
    for node in range(case.world // NODE):
        ranks = range(node * NODE, (node + 1) * NODE)
        held = [experts(case, rank) if not case.group else dense(case, rank) for rank in ranks]
        tensors: dict[HeldTensor, int] = {}
        boxes: dict[Box, int] = {}
        of, box, place = [], [], []
        for mine in held:
            end = 0
            for tensor, one in mine:
                of.append(tensors.setdefault(tensor, len(tensors)))
                box.append(boxes.setdefault(one, len(boxes)))
                place.append(end)
                end += one.volume * 4
        columns = FragmentColumns(np.array(of), np.ones(len(of), np.int64), np.array(place), np.array(box))
        counts = np.array([len(mine) for mine in held])
        yield declaration.encode_columns(declaration.declared(tuple(ranks), tuple(tensors), tuple(boxes), columns, counts))


def said(ranks: tuple[int, ...], world: int, step: int) -> list[SlotTable]:
    return [SlotTable("r", step, 1, rank, world, ("model",), (), {}, {}) for rank in ranks]


def measure(case: Case) -> dict[str, Any]:
    """Seconds, bytes and balance."""
    gc_tuning.settle()  # as the daemon does before it plans
    bodies = list(encoded(case))
    packed = [len(zstandard.compress(body)) for body in bodies]
    digests = [hashlib.sha256(body).hexdigest() for body in bodies]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began, cpu = time.perf_counter(), time.process_time()
    declared = [declaration.decode(body) for body in bodies]
    decoded_s = time.process_time() - cpu
    me = len(bodies) // 3

    def parts(step: int) -> list[tuple[str, DecodedPart]]:
        both = zip(digests, declared, strict=True)
        return [(digest, DecodedPart(one, said(one.ranks, case.world, step))) for digest, one in both]

    made = share_planner.plan_share(parts(1), me)
    first_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    again = parts(2)
    began = time.perf_counter()
    share_planner.plan_share(again, me)
    next_s = time.perf_counter() - began
    (known,) = share_planner._remembered.values()
    loads = np.zeros(len(bodies), np.int64)
    np.add.at(loads, known.placed.owners, known.placed.grid.lengths)
    return {
        "tensors": sum(len(file.tensors) for file in made.plan.files),
        "boxes": len(known.world.box),
        "declared": sum(packed) / len(packed),
        "decoded_s": decoded_s,
        "first_s": first_s,
        "cpu_s": cpu_s,
        "next_s": next_s,
        "balance": float(loads.max() / loads.mean()),
        "gib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.joint_plans", description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", choices=CASES, help="one of the cases")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # one case, in this process
    given = parser.parse_args()
    if given.here:
        print(json.dumps(measure(CASES[given.only])))
        return 0
    found = [_apart(name) for name in ([given.only] if given.only else CASES)]
    return 1 if any(found) else 0


def _apart(name: str) -> bool:
    """One case in a process of its own, and its line; whether it missed a bar."""
    command = [sys.executable, "-m", "benchmarks.joint_plans", "--here", "--only", name]
    done = subprocess.run(command, cwd=TOP, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    one: dict[str, Any] = json.loads(done.stdout)
    missed: bool = one["cpu_s"] > FIRST_S or one["next_s"] > NEXT_S or one["balance"] > BALANCE
    print(
        f"{name:16} {one['tensors']} tensors, {one['boxes']} boxes, {one['declared']:.0f} B a node: decoded in "
        f"{one['decoded_s']:.2f} s, first {one['first_s']:.2f} s ({one['cpu_s']:.2f} s of processor), next "
        f"{one['next_s']:.3f} s, most {one['balance']:.3f} of the mean, {one['gib']:.2f} GiB{' MISSED' * missed}",
        flush=True,
    )
    return missed


if __name__ == "__main__":
    sys.exit(main())
