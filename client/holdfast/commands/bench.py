"""`holdfast bench`: what this machine can do, and what to expect of its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from holdfast.config import DEFAULT_ROOT
from holdfast.terminal import console
from holdfast.terminal.machine_limits import Expectation, Limits, expect, measure
from holdfast.terminal.options import AsJson, Root
from holdfast_formats.errors import InvalidRequest

SIZES = (2**30, 16 * 2**30, 128 * 2**30)

SizeMiB = Annotated[int, typer.Option("--size-mib", metavar="MIB", min=8, help="How many bytes to measure with.")]
StateGiB = Annotated[
    float | None, typer.Option("--state-gib", metavar="GIB", min=0.0, help="The state of all ranks of this node.")
]


def bench(root: Root = None, size_mib: SizeMiB = 1024, state_gib: StateGiB = None, as_json: AsJson = False) -> None:
    """Measure memory, digests and the disk under --root, and say how long saves and restores should take here.

    Writes one file of --size-mib there three times, reads it back, and removes it. Takes about ten seconds.
    """
    with console.reporting(as_json):
        directory = _directory(root)
        with console.err().status("measuring") as status:
            limits = measure(directory, size_mib * 2**20, lambda step: status.update(step) if not as_json else None)
    sizes = SIZES if state_gib is None else (int(state_gib * 2**30),)
    expected = [expect(limits, size) for size in sizes]
    if as_json:
        found = {"directory": str(directory), **limits._asdict(), "expected": [one._asdict() for one in expected]}
        console.print_json(found)
    else:
        _print(directory, limits, expected)


def _directory(root: Path | None) -> Path:
    """The root itself, or where the daemon would make it."""
    directory = root if root is not None else DEFAULT_ROOT if DEFAULT_ROOT.is_dir() else Path()
    if not directory.is_dir():
        raise InvalidRequest(f"{directory} is not a directory", hint="name the directory of checkpoints with --root")
    return directory.resolve()


def _print(directory: Path, limits: Limits, expected: list[Expectation]) -> None:
    out = console.out()
    how = "past the page cache (O_DIRECT)" if limits.direct else "through the page cache: this file system has no O_DIRECT"
    table = console.table("LIMIT", "PER SECOND", "", right=("PER SECOND",))
    table.add_row("copy in memory", console.human_bytes(limits.copy), "one thread; what staging a save takes")
    table.add_row("digest", console.human_bytes(limits.digest), "xxh3-64, one thread")
    table.add_row("durable write", console.human_bytes(limits.write), f"{directory}, {how}")
    table.add_row("read", console.human_bytes(limits.read), "the same file, from the disk")
    out.print(table)
    out.print()
    rows = console.table("STATE OF THIS NODE", "STAGED", "DURABLE", "RESTORED", right=("STAGED", "DURABLE", "RESTORED"))
    for one in expected:
        times = (console.human_seconds(s) for s in (one.staged_s, one.durable_s, one.restore_s))
        rows.add_row(console.human_bytes(one.bytes), *times)
    out.print(rows)
    out.print(
        Text(
            "save() returns at once: it is staged while the next step computes, and training waits for the disk only "
            "where saves come faster than they become durable.",
            "dim",
        )
    )
