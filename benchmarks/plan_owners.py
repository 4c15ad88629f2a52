"""How long it takes to decide which node writes which block, and how well that balances: 16 384 ranks on 2 048 nodes.

python -m benchmarks.plan_owners

Synthetic checkpoints: each tensor is sharded over the ranks of one group (pipeline stages of 8, 64 or 512 ranks), or of
several such groups that hold the same (`copies`). `dense` is a table in which every node holds some of every block. Each
case runs in a process of its own. Exit status 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from holdfast_formats.disk.packing import FILE_BYTES_MAX
from holdfast_formats.staging.blocks import Grid, HeldSpans, Holders, grid, holders, owners

NODES, NODE = 2048, 8  # nodes, and ranks of each
HEADER_BYTES = 2**16
SECONDS_MAX, BALANCE_MAX = 3.0, 1.05
GIB = 2**30
TOP = Path(__file__).parents[1]


class Case(NamedTuple):
    """So many tensors of so many bytes in all, each sharded over a group of ranks, or over several that hold the same."""

    tensors: int
    bytes: int
    group: int
    copies: int = 1


CASES = {
    "node": Case(100_000, 1_340 * 10**9, 8),
    "64 ranks": Case(100_000, 1_340 * 10**9, 64),
    "64 ranks, 4 copies": Case(100_000, 1_340 * 10**9, 64, 4),
    "512 ranks": Case(100_000, 1_340 * 10**9, 512),
    "405B, 64 ranks": Case(3_400, 5_700 * 10**9, 64),
    "405B, 512 ranks": Case(3_400, 5_700 * 10**9, 512),
    "dense": Case(100_000, 1_340 * 10**9, NODES * NODE),
}


def files(case: Case) -> tuple[Grid, HeldSpans]:
    """The grid of a case's files, and what nodes hold of them: consecutive tensors belong to one group."""
    sizes = np.random.default_rng(0).choice([1, 2, 4, 8], case.tensors).astype(np.int64)
    sizes = sizes * (case.bytes // int(sizes.sum()) // 4096 * 4096)
    begins = np.cumsum(sizes) - sizes
    file = begins // FILE_BYTES_MAX
    file = np.unique(file, return_inverse=True)[1]  # long tensors leave none of an index
    firsts = begins[np.searchsorted(file, np.arange(file[-1] + 1))]
    begins = begins - firsts[file] + HEADER_BYTES
    ends = np.zeros(len(firsts), np.int64)
    np.maximum.at(ends, file, begins + sizes)
    width = case.group // NODE  # nodes of a group
    groups = NODES // (width * case.copies)
    lead = np.arange(case.tensors) * groups // case.tensors * (width * case.copies)
    part = np.tile(np.arange(width), case.copies)
    low, high = (sizes[:, None] * edge // width for edge in (part, part + 1))
    shape = low.shape
    begin, end = (begins[:, None] + low).ravel(), (begins[:, None] + high).ravel()
    node = (lead[:, None] + np.arange(shape[1])).ravel()
    order = np.lexsort((node, begin, np.broadcast_to(file[:, None], shape).ravel()))
    rows = HeldSpans(np.repeat(file, shape[1]), begin, end, end - begin, node)
    return grid(ends.tolist()), HeldSpans(*(column[order] for column in rows))


def dense(case: Case) -> tuple[Grid, Holders]:
    """Nearly equal parts of every block on every node."""
    found = grid([FILE_BYTES_MAX] * (case.bytes // FILE_BYTES_MAX))
    block = np.repeat(np.arange(len(found.file), dtype=np.int32), NODES)
    held = found.lengths[block] // NODES + np.random.default_rng(0).integers(0, 2**12, len(block))
    return found, Holders(block, np.tile(np.arange(NODES, dtype=np.int32), len(found.file)), held.astype(np.int32))


def measure(case: Case) -> dict[str, Any]:
    """Seconds, balance, and the part of all bytes that owners get from other nodes."""
    began = time.perf_counter()
    if case.group == NODES * NODE:
        blocks, table = dense(case)
    else:
        blocks, spans = files(case)
        began = time.perf_counter()
        table = holders(blocks, spans, NODES)
    held_s = time.perf_counter() - began
    began = time.perf_counter()
    found = owners(blocks, table, NODES)
    owners_s = time.perf_counter() - began
    loads = np.zeros(NODES, np.int64)
    np.add.at(loads, found, blocks.lengths)
    near = int(table.bytes[found[table.block] == table.node].sum())
    return {
        "blocks": len(found),
        "pairs": len(table.block),
        "holders_s": held_s,
        "owners_s": owners_s,
        "balance": float(loads.max() / loads.mean()),
        "least": float(loads.min() / loads.mean()),
        "remote": 1 - near / int(blocks.lengths.sum()),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_owners", description=__doc__)
    parser.add_argument("--only", choices=CASES, help="one of the cases")
    parser.add_argument("--json", type=Path, help="where the numbers go")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # one case, in this process
    given = parser.parse_args()
    if given.here:
        print(json.dumps(measure(CASES[given.only])))
        return 0
    found = {name: _apart(name) for name in ([given.only] if given.only else CASES)}
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    return 1 if any(each["missed"] for each in found.values()) else 0


def _apart(name: str) -> dict[str, Any]:
    """One case in a process of its own, and its line."""
    command = [sys.executable, "-m", "benchmarks.plan_owners", "--here", "--only", name]
    done = subprocess.run(command, cwd=TOP, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    found["missed"] = found["owners_s"] > SECONDS_MAX or found["balance"] > BALANCE_MAX
    print(
        f"{name:20} {found['blocks']} blocks, {found['pairs']} pairs: holders {found['holders_s']:.2f} s, owners "
        f"{found['owners_s']:.2f} s, most {found['balance']:.3f} and least {found['least']:.3f} of the mean, "
        f"{found['remote']:.1%} from other nodes, {found['peak_bytes'] / GIB:.2f} GiB{' MISSED' * found['missed']}",
        flush=True,
    )
    return found


if __name__ == "__main__":
    sys.exit(main())
