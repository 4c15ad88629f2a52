"""How many bytes are read for each byte that is needed: the matrix's layouts on real models' shapes, and real processes.

python -m benchmarks.reads

The first table is the read planner's arithmetic (`tests/layouts/ratios.py`): what a node of so many ranks reads. The second
counts what processes ask of the kernel (`rchar`) in a second load, when nothing is imported any more: Holdfast's `restore`,
from the directory, and `torch.distributed.checkpoint.load`, of one state of DTensors cut along dimension 0 or 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from holdfast import Checkpointer
from tests.daemons import running
from tests.layouts.matrix import LAYOUTS
from tests.layouts.ratios import EXCEEDING, ratios
from tests.layouts.realistic import REAL, manifest

TOP = Path(__file__).parents[1]
STATE_BYTES = 2**28
SIDE = 2048  # elements of a row and of a column
CHANGES = ((1, 2), (2, 1), (2, 4), (4, 2))  # ranks that save, ranks that load
CUTS = ("rows", "columns", "replicated")
RUN, STEP, GROUP = "reads", 1, "model"
TIMEOUT_S = 300


class Job(NamedTuple):
    """What the ranks of one launch do."""

    action: str  # save or load
    cut: str
    root: str
    socket: str
    dcp: str
    out: str
    size: int


def planned() -> Iterator[dict[str, Any]]:
    """A row for each layout, group and size of a node."""
    for model, make in REAL.items():
        real = make()
        stored = manifest(real.groups, real.whole_bytes)
        for layout, world in LAYOUTS[model].items():
            for group in ("model", "optim"):
                for found in ratios(real, stored, world.text, group):
                    exceeds = (model, layout, found.node) in EXCEEDING
                    yield {"model": model, "layout": layout, **found._asdict(), "exceeds": exceeds}


def measured(directory: Path, size: int) -> Iterator[dict[str, Any]]:
    """A row for each change of ranks and way to cut; every launch in processes of its own."""
    for cut in CUTS:
        for saving in dict.fromkeys(before for before, _ in CHANGES):
            home = directory / f"{cut}-{saving}"
            home.mkdir()
            job = Job("save", cut, str(home / "root"), str(home / "root.sock"), str(home / "dcp"), str(home / "out"), size)
            with running(home / "root"):
                _launch(job, saving)
            for loading in (after for before, after in CHANGES if before == saving):
                _launch(job._replace(action="load"), loading)
                ranks = [json.loads(Path(f"{job.out}.{rank}").read_text()) for rank in range(loading)]
                total = {key: sum(rank[key] for rank in ranks) for key in ("needed", "holdfast", "dcp")}
                yield {"cut": cut, "saved": saving, "loaded": loading, **total}


def _launch(job: Job, ranks: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "benchmarks.reads", "--job", json.dumps(job)]
    about = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=TOP, env=about, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])


def work(job: Job) -> None:
    """One rank: save with both, or load with both and say what that read."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    state = _state(job)
    if job.action == "save":
        with Checkpointer(RUN, {GROUP: state}, at=job.socket) as checkpointer:
            checkpointer.save(STEP, wait="durable")
        dcp.save(state, checkpoint_id=job.dcp)
    else:
        needed = sum(_local(tensor).nbytes for tensor in state.values())
        checkpointer = Checkpointer(RUN, {GROUP: state}, at=job.root)
        found = {
            "needed": needed,
            "holdfast": _read_by(lambda: checkpointer.restore(STEP, groups=(GROUP,)), state),
            "dcp": _read_by(lambda: dcp.load(state, checkpoint_id=job.dcp), state),
        }
        Path(f"{job.out}.{dist.get_rank()}").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort now and then while an interpreter unwinds (torch 2.13)


def _state(job: Job) -> dict[str, torch.Tensor]:
    """Tensors of numbers that occur once, on one rank whole, on several cut."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placement = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}[job.cut]
    rank, world = dist.get_rank(), dist.get_world_size()
    found: dict[str, torch.Tensor] = {}
    for number in range(job.size // (4 * SIDE * SIDE)):
        whole = torch.arange(SIDE * SIDE, dtype=torch.float32).view(SIDE, SIDE) + number
        if world > 1:
            local = whole if job.cut == "replicated" else whole.chunk(world, CUTS.index(job.cut))[rank].contiguous()
            whole = DTensor.from_local(local, mesh, [placement], run_check=False)
        found[f"layers.{number}.weight"] = whole
    return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _read_by(load: Callable[[], object], state: dict[str, torch.Tensor]) -> int:
    """Bytes that the second of two loads reads; both must bring the right values."""
    read = 0
    for _ in range(2):
        for tensor in state.values():
            _local(tensor).zero_()
        before = _rchar()
        load()
        read = _rchar() - before
        if any(not bool(_local(tensor).any()) for tensor in state.values()):
            raise SystemExit("what was loaded is not what was saved")
    return read


def _rchar() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reads", description=__doc__)
    parser.add_argument("--bytes", type=int, default=STATE_BYTES, help="of the state of the processes (default: 256 MiB)")
    parser.add_argument("--at", type=Path, help="a directory on the disk to use (default: the system's for temporary files)")
    parser.add_argument("--json", type=Path, help="where the numbers go")
    parser.add_argument("--job", help=argparse.SUPPRESS)  # what this rank does
    given = parser.parse_args()
    if given.job:
        work(Job(*json.loads(given.job)))
    rows = []
    for row in planned():
        rows.append(row)
        note = f"  over {row['bar']}" if row["worst"] > row["bar"] else ""
        print(
            f"{row['model']:6} {row['layout']:28} {row['group']:6} nodes of {row['node']}: "
            f"{row['read'] / row['needed']:.3f}, at most {row['worst']:.3f}{note}"
        )
    loads = []
    with tempfile.TemporaryDirectory(dir=given.at, prefix="reads-") as directory:
        for row in measured(Path(directory), given.bytes):
            loads.append(row)
            by = ", ".join(f"{who} {row[who] / row['needed']:.3f}" for who in ("holdfast", "dcp"))
            print(
                f"{row['cut']:10} {row['saved']} -> {row['loaded']} ranks, bytes read for one that is needed: {by}",
                flush=True,
            )
    if given.json:
        given.json.write_text(json.dumps({"planned": rows, "measured": loads}, indent=1))
    return 1 if any(row["worst"] > row["bar"] and not row["exceeds"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
