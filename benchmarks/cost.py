"""What digests and statistics cost: durable bytes per second of saves with both, with digests alone, and with neither.

python -m benchmarks.cost [--mib 2048] [--rounds 7] [--way apart|streak] [--directory DIR] [--json PATH]

All three take turns in one run, on one daemon, one state and one disk; every save changes every extent. `apart`: a save
begins when the one before has been read back, as in training. `streak`: as soon as it is durable, so that checks and saves
compete.

Nobody can switch proofs off in a daemon. The one measured here is a process of this module, in which they are replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from holdfast import Api, Checkpointer
from holdfast_formats import naming
from holdfast_formats.disk.manifests import EXTENT_BYTES_MAX
from holdfast_formats.disk.packing import EXTENT_BYTES_MIN

RUN = "cost"
MODES = ("neither", "digests", "both")  # in turn: changes are measured from a checkpoint that has digests
BAR = 0.10
TENSORS = 64
STREAK = 4  # saves in a row, of which the first is not counted: no check goes on beside it
SWITCH = "switch"
_TICKS = os.sysconf("SC_CLK_TCK")


class NoDigest:
    """Stands for a digest that is not made."""

    def update(self, data: Any) -> None:
        """Looks at nothing."""

    def hexdigest(self) -> str:
        return "0" * 16


def serve(root: Path, switch: Path) -> int:
    """The daemon as it is, but for what the switch says not to do."""
    from holdfast_service import __main__
    from holdfast_service.daemon.checking import health, verifier
    from holdfast_service.daemon.writing import gathering

    digested, passed = gathering.running, health.Examination.passed  # type: ignore[attr-defined]
    checked, numbers = verifier.verification.check, verifier.verification.numbers_in  # type: ignore[attr-defined]

    def mode() -> str:
        return switch.read_text()

    gathering.running = lambda: NoDigest() if mode() == "neither" else digested()  # type: ignore
    verifier.verification.check = lambda piece, data: None if mode() == "neither" else checked(piece, data)  # type: ignore
    verifier.verification.numbers_in = lambda listed, data: (  # type: ignore[attr-defined]
        listed.rows["digest"] if mode() == "neither" else numbers(listed, data)
    )
    health.Examination.passed = lambda *given: passed(*given) if mode() == "both" else None  # type: ignore
    return __main__.main(["--root", str(root), "--socket", f"{root}.sock", "--listen", "127.0.0.1:0", "--keep", "2"])


class Daemon:
    """A daemon of this module, in a process of its own."""

    def __init__(self, directory: Path) -> None:
        self.root, self._switch = directory / "root", directory / SWITCH
        self.turn("both")
        command = [sys.executable, "-m", "benchmarks.cost", "--serve", str(self.root)]
        with open(directory / "log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        limit = time.monotonic() + 60
        while not (self.root / naming.DAEMON_FILE).exists():
            if self.process.poll() is not None or time.monotonic() > limit:
                raise SystemExit((directory / "log").read_text())
            time.sleep(0.02)
        self.url = str(json.loads((self.root / naming.DAEMON_FILE).read_bytes())["url"])

    def turn(self, mode: str) -> None:
        self._switch.write_text(mode)

    @property
    def processor_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(120)


class Saves:
    """Saves of one state, timed from `save()` to durable."""

    def __init__(self, daemon: Daemon, checkpointer: Checkpointer, tensors: list[torch.Tensor], api: Api) -> None:
        self.daemon, self._checkpointer, self._tensors, self._api = daemon, checkpointer, tensors, api
        self._step = 0
        self.bytes = sum(tensor.nbytes for tensor in tensors)

    def save(self) -> float:
        """Change every extent, save, and return the seconds until that was durable."""
        for tensor in self._tensors:
            tensor[:: EXTENT_BYTES_MIN // tensor.itemsize] += 1
        self._step += 1
        began = time.monotonic()
        self._checkpointer.save(self._step).result()
        return time.monotonic() - began

    def settle(self) -> float:
        """Wait until the newest one has been read back, and return the seconds."""
        began = time.monotonic()
        while not self._api.checkpoint(RUN, self._step).verified:
            time.sleep(0.01)
        time.sleep(0.1)  # what retention lets go is removed
        return time.monotonic() - began - 0.1


def measure(saves: Saves, rounds: int, way: str) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {mode: {"save_s": [], "check_s": [], "processor_s": []} for mode in MODES}
    for number in range(-1, rounds):
        for mode in MODES:
            saves.daemon.turn(mode)
            before = saves.daemon.processor_s
            times = [saves.save() for _ in range(1 if way == "apart" else STREAK)]
            check = saves.settle()
            if number >= 0:  # the first of each kind warms up
                kept = found[mode]
                kept["save_s"] += times if way == "apart" else times[1:]
                kept["check_s"].append(check)
                kept["processor_s"].append((saves.daemon.processor_s - before) / len(times))
    return found


def summed_up(found: dict[str, dict[str, list[float]]], size: int) -> dict[str, Any]:
    """Medians and spread, and each kind's throughput as a fraction of that with neither."""
    rates = {mode: [size / seconds for seconds in kept["save_s"]] for mode, kept in found.items()}
    base = statistics.median(rates["neither"])
    return {
        mode: {
            "bytes_per_second": _spread(rates[mode]),
            "cost": 1 - statistics.median(rates[mode]) / base,
            **{name: _spread(values) for name, values in kept.items()},
        }
        for mode, kept in found.items()
    }


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    quartiles = statistics.quantiles(ordered, n=4) if len(ordered) > 1 else [ordered[0]] * 3
    return {"median": quartiles[1], "low": quartiles[0], "high": quartiles[2], "count": len(ordered)}


@contextmanager
def _saves(directory: Path, mib: int) -> Iterator[Saves]:
    daemon = Daemon(directory)
    try:
        tensors = [torch.randn(mib * 2**20 // TENSORS // 4) for _ in range(TENSORS)]
        state = {"model": {f"layers.{i}.weight": tensor for i, tensor in enumerate(tensors)}}
        with Api(daemon.url) as api, Checkpointer(RUN, state, at=f"{daemon.root}.sock") as checkpointer:
            checkpointer.prepare(wait=True)
            yield Saves(daemon, checkpointer, tensors, api)
    finally:
        daemon.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--way", choices=("apart", "streak"), default="apart")
    parser.add_argument("--directory", type=Path, help="on the disk to be measured")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        return serve(options.serve, options.serve.parent / SWITCH)
    assert options.mib * 2**20 // TENSORS >= EXTENT_BYTES_MAX // 64, "too little to be cut as a state is"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory, _saves(Path(directory), options.mib) as saves:
        found = summed_up(measure(saves, options.rounds, options.way), saves.bytes)
        size = saves.bytes
    cores = len(os.sched_getaffinity(0))
    document = {"way": options.way, "bytes": size, "cores": cores, "rounds": options.rounds, "modes": found}
    print(f"{size / 2**30:.2f} GiB, {cores} cores, {options.way}")
    print(f"{'':10}{'GB/s':>8}{'quartiles':>16}{'cost':>8}{'check s':>9}{'daemon CPU s a save':>21}")
    for mode, one in found.items():
        rate = {name: value / 1e9 for name, value in one["bytes_per_second"].items()}
        print(
            f"{mode:10}{rate['median']:8.2f}{rate['low']:9.2f} –{rate['high']:5.2f}{one['cost']:8.1%}"
            f"{one['check_s']['median']:9.2f}{one['processor_s']['median']:21.2f}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1))
    missed = found["both"]["cost"] > BAR
    print(f"bar: digests and statistics cost at most {BAR:.0%}: {'missed' if missed else 'met'}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
