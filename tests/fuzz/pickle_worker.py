"""Reads mutated pickles and torch files in a process of its own, and prints what became of them.

    python -m tests.fuzz.pickle_worker SEED COUNT DIRECTORY

The directory has what is begun from, as `pickle_seeds.write` writes it: this process has no torch, whose memory counts.
Whatever Python reports that a pickle could have caused (imports, files, processes, code) ends it with an error.
"""

from __future__ import annotations

import json
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from holdfast_formats.errors import LEAVES, CheckpointError
from holdfast_formats.files import Files
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.wings.convert.foreign import pickles
from holdfast_service.wings.convert.foreign.pruned_values import PrunedValue
from tests.kit.files import FilesInMemory

from . import pickle_seeds

LEFT_OUT = ReadOptions(leave_out=("*a*", "*[[]1]", "state.?"))
READ_S = 20  # the slowest that is allowed to be slow takes a tenth of it
_INNOCENT = ("builtins.id", "object.", "sys._getframe", "sys.set", "array.", "cpython.", "gc.", "time.")


class InMemory(FilesInMemory):
    """One file, of which no reader asks for much at once."""

    def __init__(self, data: bytes) -> None:
        super().__init__({"f": data})

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        assert length is None or length <= 2**25
        return super().read(path, offset, length)


def read_one(files: Files, torch_file: bool) -> str:
    """What became of it; any error but one of ours goes on. Torch files are also read as imports do, without some keys."""
    try:
        if torch_file:
            PrunedValue(pickles.read_torch(files, "f", opaque=True), LEFT_OUT, "f")
            pickles.read_torch(files, "f", pickle_seeds.RECORDS)
        else:
            pickles.read_pickle(files, "f", pickle_seeds.RECORDS)
    except CheckpointError as error:
        assert type(error) in LEAVES and str(error).startswith("f") and len(str(error)) < 1000, str(error)
        return type(error).__name__
    return "read"


def peak_bytes() -> int:
    """The most memory of this program; `getrusage` would also count the parent's, from before `exec`."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def main(seed: int, count: int, directory: Path) -> None:
    chance = random.Random(seed)
    seeds = [(path.read_bytes(), path.suffix == ".pt") for path in sorted(directory.iterdir())]
    found: Counter[str] = Counter()
    for data, torch_file in seeds:  # what is imported late is imported now
        assert read_one(InMemory(data), torch_file) == "read"
        read_one(InMemory(pickle_seeds.mutated(chance, data)), torch_file)
    watched = [False]

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if watched[0] and not event.startswith(_INNOCENT):
            raise SystemExit(f"reading caused {event} {args!r:.200}")

    def late(number: int, frame: FrameType | None) -> None:
        raise SystemExit(f"not read within {READ_S} s")

    sys.addaudithook(watch)
    signal.signal(signal.SIGALRM, late)
    for _ in range(count):
        data, torch_file = chance.choice(seeds)
        hostile = pickle_seeds.mutated(chance, data)
        signal.alarm(READ_S)
        watched[0] = True
        found[read_one(InMemory(hostile), torch_file)] += 1
        watched[0] = False
    signal.alarm(0)
    print(json.dumps({**found, "peak": peak_bytes()}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
