"""Four daemons write one checkpoint to one disk, against one daemon that writes the same, and against what the disk takes:

    python -m benchmarks.many_writers [--mib 256] [--rounds 7] [--directory DIR]

Each round saves the same state through four daemons, through one, and writes as many bytes to a new file past the page
cache, in turn. Printed are medians and ranges of: seconds from save() until all ranks know that it is committed, seconds of
the daemons' processors, and by round the speed of the four against the one, and of both against the disk.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import limits
from benchmarks.joint import World, summary
from tests.databases import running_postgres
from tests.regressions.test_many_daemons import Daemon

WRITERS = 4
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def processor_s(daemons: Sequence[Daemon]) -> float:
    """What these processes have used until now, in seconds of a core."""
    used = 0
    for daemon in daemons:
        fields = Path(f"/proc/{daemon.process.pid}/stat").read_text().rpartition(")")[2].split()
        used += int(fields[11]) + int(fields[12])
    return used * _TICK_S


def rounds(name: str, many: World, one: World, disk: Callable[[], float], count: int) -> None:
    """The first round is not counted. Each round begins with another one of the three."""
    seconds: dict[str, list[float]] = defaultdict(list)
    used: dict[str, list[float]] = defaultdict(list)

    def save(side: str, world: World) -> None:
        daemons = list({id(daemon): daemon for daemon in world.places}.values())
        before = processor_s(daemons)
        seconds[side].append(world.save())
        used[side].append(processor_s(daemons) - before)
        world.settle()

    acts: list[Callable[[], None]] = [
        lambda: save("four", many),
        lambda: save("one", one),
        lambda: seconds["disk"].append(disk()),
    ]
    for number in range(count + 1):
        for act in acts[number % 3 :] + acts[: number % 3]:
            act()
    four, single, written = (seconds[side][1:] for side in ("four", "one", "disk"))
    print(f"{name}: four daemons {summary(four)} s, one {summary(single)} s, the disk alone {summary(written)} s")
    print(f"  processor: four {summary(used['four'][1:])} s, one {summary(used['one'][1:])} s")
    against = {"one": _ratios(single, four), "the disk": _ratios(written, four)}
    print(f"  speed of four against one {summary(against['one'])}, against the disk {summary(against['the disk'])}")
    print(f"  speed of one against the disk {summary(_ratios(written, single))}", flush=True)


def _ratios(theirs: Sequence[float], ours: Sequence[float]) -> list[float]:
    return [their_s / our_s for their_s, our_s in zip(theirs, ours, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=256, help="of state a rank")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path)
    given = parser.parse_args()
    with running_postgres() as postgres, tempfile.TemporaryDirectory(dir=given.directory) as made:
        roots = [Path(made) / which / "root" for which in ("many", "one")]
        for root in roots:
            root.parent.mkdir()
        url, own = postgres.take(), postgres.take()
        daemons = [Daemon(roots[0], f"n{number}", url) for number in range(WRITERS)]
        alone = Daemon(roots[1], "alone", own)
        size = WRITERS * given.mib * 2**20
        disk = limits.Disk(Path(made) / "alone", size)
        for name, columns in (("rows", False), ("columns", True)):
            many = World(name, daemons, given.mib, columns)
            one = World(name, [alone] * WRITERS, given.mib, columns)
            rounds(f"{name}, {WRITERS} x {given.mib} MiB", many, one, disk.write, given.rounds)
            many.close()
            one.close()
        for daemon in (*daemons, alone):
            daemon.stop()


if __name__ == "__main__":
    main()
