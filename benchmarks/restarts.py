"""What a failure costs, beside peers: `python -m benchmarks.restarts [--ranks 1] [--mib 1024] [--rounds 3] [--only NAME…]`.

All ranks of a job save once and are killed. They are started again at once, and once more as on a machine that was started
again: nothing of the peer runs, and nothing is in the page cache. A rank's own part is what the library adds: its import and
all until the state is there. The slowest rank counts. Every tensor is compared with what was saved, outside of that time.
LIMIT is one second, and the bytes of all ranks: copied in memory, or read from the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from . import disk, environments
from .peers import PEERS, Place, loaders, open_peer
from .processes import marked
from .state import State, allocate, fill, llama

TOP = Path(__file__).parents[1]
MIB = 2**20
NAMES = ("holdfast", "dcp-sync", "torch-save", "torch-checkpointing", "dlrover")
KILLED, AGAIN = "trainers killed", "machine started again"
OVERHEAD_S = 1.0
STEP = 1
WAIT_S = 120.0
MARK = "HOLDFAST_RESTARTS"


class Start(NamedTuple):
    """Seconds of one rank: the library's own, from the start of the process to the end of the restore, and what it said."""

    own: float
    total: float
    digest: str


def restore(name: str, directory: Path, state: State) -> None:
    """As a trainer of this peer does after a failure."""
    if name != "holdfast":
        next(iter(loaders(PEERS[name]).values()))(Place(directory, state.world), state, STEP)
        return
    from holdfast import Checkpointer

    found = Checkpointer("bench", of_groups(state), at=directory, fenced=True).restore()
    assert found == STEP


def of_groups(state: State) -> dict[str, Any]:
    from .peers.shards import as_global

    groups: dict[str, Any] = {}
    for name, tensor in as_global(state).items():
        groups.setdefault(name.partition("/")[0], {})[name.partition("/")[2]] = tensor
    return groups


def rank(name: str, directory: Path, mib: int, saves: bool, began: float) -> None:
    """One rank. Prints a `Start` as JSON, and waits to be killed."""
    import torch.distributed as dist

    from .peers import shards  # torch's DTensor: a trainer that shards its state has imported it

    number, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    state = allocate(llama(mib * MIB), number, world, world)
    shards.as_global(state)
    if saves:
        fill(state, STEP)
        peer = open_peer(PEERS[name], Place(directory, world), state)
        peer.save(STEP)
        peer.fence()
        peer.wait()
        disk.sync_tree(directory)
    dist.barrier()
    begun = time.monotonic()
    if not saves:
        restore(name, directory, state)
    ended = time.monotonic()
    print(json.dumps(Start(ended - begun, ended - began, digest(state))), flush=True)
    sys.stdin.read()


def digest(state: State) -> str:
    import torch
    import xxhash

    whole = xxhash.xxh3_64()
    for tensor in state.tensors.values():
        octets: Any = tensor.view(-1).view(torch.uint8).numpy()
        whole.update(octets)
    return whole.hexdigest()


@contextmanager
def job(python: Path, arguments: Sequence[str], world: int, mark: str) -> Iterator[list[Start]]:
    """All ranks, and what they say; everything that they started but a daemon is killed at the block's end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    began = time.monotonic()
    processes = []
    for number in range(world):
        own: dict[str, object] = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, MARK: mark}
        own |= {"TORCHELASTIC_RUN_ID": mark, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
        command = [str(python), "-m", "benchmarks.restarts", "--rank", *arguments, str(began)]
        surroundings = {**os.environ, **{name: str(value) for name, value in own.items()}}
        surroundings.pop("PYTHONDONTWRITEBYTECODE", None)  # as where packages are installed
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, cwd=TOP, env=surroundings, stdin=pipe, stdout=pipe, text=True))
    try:
        yield [said(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for end in (process.stdin, process.stdout):  # which a process that it started may hold open
                if end is not None:
                    end.close()


def said(process: subprocess.Popen[str]) -> Start:
    assert process.stdout is not None
    late = threading.Timer(WAIT_S, process.kill)
    late.start()
    try:
        for line in process.stdout:  # some peers print, too
            if line.startswith("[") and line.endswith('"]\n'):
                return Start(*json.loads(line))
    finally:
        late.cancel()
    raise RuntimeError(f"a rank ended with status {process.wait()}")


def end_all(mark: str, root: Path) -> None:
    """End what a peer has left running, a daemon in order."""
    from holdfast.terminal import restart_times  # not in a rank, whose own part the import of holdfast is

    restart_times._end_daemon(root)
    for pid in marked(MARK, mark):
        os.kill(pid, signal.SIGKILL)


def measure(name: str, python: Path, world: int, mib: int, place: Path) -> Mapping[str, Start]:
    """One round of a peer. Raises `RuntimeError` for a rank that fails or restores something else."""
    found: dict[str, Start] = {}
    with tempfile.TemporaryDirectory(prefix=".restarts-", dir=place, ignore_cleanup_errors=True) as made:
        root, moved, mark = Path(made, "root"), Path(made, "moved"), Path(made).name
        root.mkdir()
        try:
            with job(python, [name, str(root), str(mib), "save"], world, mark) as saved:
                expected = [one.digest for one in saved]
            with job(python, [name, str(root), str(mib), "restore"], world, mark) as starts:
                found[KILLED] = slowest(starts, expected)
            end_all(mark, root)
            root.rename(moved)  # so that no process that kept memory for it is found
            if disk.drop_caches():
                with job(python, [name, str(moved), str(mib), "restore"], world, mark) as starts:
                    found[AGAIN] = slowest(starts, expected)
        finally:
            end_all(mark, root)
            end_all(mark, moved)
    return found


def slowest(starts: Sequence[Start], expected: Sequence[str]) -> Start:
    if [one.digest for one in starts] != list(expected):
        raise RuntimeError("a rank did not restore what it had saved")
    return max(starts, key=lambda one: one.own)


def show(found: Mapping[str, Mapping[str, Sequence[Start]]], limits: Mapping[str, float]) -> list[str]:
    """Print medians; returns the bars that Holdfast missed."""
    missed = []
    print("after | peer | own (range) | process start to restored")
    for after, limit in limits.items():
        print(f"{after} | limit | {limit:.2f} |")
        for name, rounds in found.items():
            own, total = ([getattr(one, what) for one in rounds.get(after, ())] for what in ("own", "total"))
            if own:
                shown = f"{median(own):.2f} ({min(own):.2f}–{max(own):.2f}) | {median(total):.2f}"
                print(f"{after} | {PEERS[name].title} | {shown}", flush=True)
            if own and name == "holdfast" and median(own) > limit:
                missed.append(f"{after}: {median(own):.2f} s over {limit:.2f} s")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--mib", type=int, default=1024, help="of each rank")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--directory", type=Path, default=TOP / ".bench")
    given = parser.parse_args()
    from holdfast.terminal import machine_limits

    given.directory.mkdir(exist_ok=True)
    size = given.ranks * given.mib * MIB
    machine = machine_limits.measure(given.directory, 1024 * MIB, lambda _: None)
    limits = {KILLED: OVERHEAD_S + size / machine.copy, AGAIN: OVERHEAD_S + size / machine.read}
    prepared = environments.prepare([PEERS[name] for name in given.only], TOP / ".bench")
    found: dict[str, dict[str, list[Start]]] = {name: {KILLED: [], AGAIN: []} for name in given.only}
    for _ in range(given.rounds):
        for name in given.only:
            python = prepared[PEERS[name].environment]
            if python.python is None:
                print(f"{name}: {python.reason}")
                continue
            try:
                for after, start in measure(name, python.python, given.ranks, given.mib, given.directory).items():
                    found[name][after].append(start)
            except RuntimeError as failure:
                print(f"{name}: {failure}", flush=True)
    print(f"{given.ranks} rank(s) of {given.mib} MiB, load {os.getloadavg()[0]:.1f}")
    missed = show(found, limits)
    for bar in missed:
        print(f"missed: {bar}")
    return 1 if missed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "save", float(sys.argv[6]))
    else:
        sys.exit(main())
