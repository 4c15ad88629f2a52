"""`holdfast bench`: measure this machine and estimate how long saves and restores take, or what a restart takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from holdfast.config import DEFAULT_ROOT
from holdfast.terminal import console, restart_times
from holdfast.terminal.machine_limits import Expectation, Limits, expect, measure
from holdfast.terminal.options import AnyRoot, AsJson
from holdfast.terminal.restart_times import Restart
from holdfast_files.objects.address import BucketAddress
from holdfast_files.objects.traffic import aws_usd
from holdfast_formats.errors import InvalidRequest

MACHINE, RESTART = "machine", "restart"
SIZES = (2**30, 16 * 2**30, 128 * 2**30)

What = Annotated[
    str, typer.Argument(metavar="[machine|restart]", help="The machine's limits, or a trainer's restart after a failure.")
]
SizeMiB = Annotated[int, typer.Option("--size-mib", metavar="MIB", min=8, help="Size of the test file in MiB.")]
StateGiB = Annotated[
    float | None,
    typer.Option(
        "--state-gib", metavar="GIB", min=0.0, help="Estimate for this total state size of all ranks on this node, in GiB."
    ),
]


def bench(
    what: What = MACHINE,
    root: AnyRoot = None,
    size_mib: SizeMiB = 1024,
    state_gib: StateGiB = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine: memory, digests and the disk. Estimates how long saves and restores take here.

    Writes one file of --size-mib six times, the last three while all cores compute, reads it back, and removes it.
    Takes about fifteen seconds. Of a bucket it also measures processor time and requests. `restart` kills a trainer
    with a state of --size-mib and starts it again, with its daemon and without, three times each, which takes about a
    minute.
    """
    if what not in (MACHINE, RESTART):
        raise typer.BadParameter(f"{what} is not one of: {MACHINE}, {RESTART}")
    if what == RESTART:
        _bench_restart(root, size_mib, state_gib, as_json)
        return
    if root is not None and root.bucket is not None:
        _bench_bucket(root.bucket, size_mib, state_gib, as_json)
        return
    with console.reporting(as_json):
        directory = _directory(None if root is None else root.directory)
        with console.err().status("measuring") as status:
            limits = measure(directory, size_mib * 2**20, lambda step: status.update(step) if not as_json else None)
    sizes = SIZES if state_gib is None else (int(state_gib * 2**30),)
    expected = [expect(limits, size) for size in sizes]
    if as_json:
        report = {"directory": str(directory), **limits._asdict(), "expected": [one._asdict() for one in expected]}
        console.print_json(report)
    else:
        _print(directory, limits, expected)


def _bench_bucket(place: BucketAddress, size_mib: int, state_gib: float | None, as_json: bool) -> None:
    if state_gib is not None:
        raise typer.BadParameter("estimates are for a directory: leave out --state-gib", param_hint="--state-gib")
    with console.reporting(as_json):
        from holdfast.terminal import bucket_limits  # with numpy and botocore

        with console.err().status("measuring") as status:
            limits = bucket_limits.measure(
                place, size_mib * 2**20, lambda step: status.update(step) if not as_json else None
            )
    if as_json:
        console.print_json({"root": place.label, **limits._asdict(), "usd": aws_usd(limits.requests)})
        return
    table = console.table("LIMIT", "PER SECOND", "CPU PER GIB", "HOW", right=("PER SECOND", "CPU PER GIB"), wrap=("HOW",))
    how = f"{bucket_limits.SENDERS} parts of 16 MiB at a time, checksum {limits.checksum}"
    table.add_row("up", console.human_bytes(limits.write), f"{limits.write_cpu_s:.2f} s", how)
    how = f"{bucket_limits.READERS} ranges of 8 MiB at a time"
    table.add_row("down", console.human_bytes(limits.read), f"{limits.read_cpu_s:.2f} s", how)
    console.out().print(table)
    asked = ", ".join(f"{count} {kind}" for kind, count in sorted(limits.requests.items()))
    size = console.human_bytes(limits.bytes)
    price = f"{aws_usd(limits.requests):.5f} USD at AWS's prices"
    console.out().print(Text(f"requests to write and read {size} once: {asked}; {price}"))


def _bench_restart(root: AnyRoot, size_mib: int, state_gib: float | None, as_json: bool) -> None:
    if state_gib is not None or (root is not None and root.bucket is not None):
        raise typer.BadParameter("restart measures a directory, with a state of --size-mib")
    size = size_mib * 2**20
    with console.reporting(as_json):
        directory = _directory(None if root is None else root.directory)
        with console.err().status("measuring") as status:

            def show(step: str) -> None:
                if not as_json:
                    status.update(step)

            found = restart_times.measure(directory, size, show)
            limits = measure(directory, size, show)
    least = [size / limits.copy, size / limits.read]
    if as_json:
        starts = [
            {"after": after, **one._asdict(), "own": one.own, "limit": limit}
            for limit, (after, one) in zip(least, found.items(), strict=True)
        ]
        console.print_json({"directory": str(directory), "bytes": size, "starts": starts})
    else:
        _print_restarts(size, found, least)


def _print_restarts(size: int, found: Mapping[str, Restart], least: Sequence[float]) -> None:
    seconds = ("TORCH", "HOLDFAST", "RESTORE", "LIMIT", "NEXT SAVE")
    table = console.table("AFTER", "BYTES FROM", *seconds, right=seconds)
    for limit, (after, one) in zip(least, found.items(), strict=True):
        times = (one.torch, one.holdfast, one.restore, limit, one.save)
        table.add_row(after, one.source, *(console.human_seconds(s) for s in times))
    out = console.out()
    out.print(table)
    out.print(
        Text(
            f"A state of {console.human_bytes(size)}. TORCH: python and torch start. HOLDFAST: it is imported. RESTORE: "
            "daemon found or started, step chosen, bytes checked and in place. LIMIT: the same bytes copied in memory, or "
            "read from the disk. NEXT SAVE: training stood still.",
            "dim",
        )
    )


def _directory(root: Path | None) -> Path:
    """The root itself, or the directory in which the daemon would create it."""
    directory = root if root is not None else DEFAULT_ROOT if DEFAULT_ROOT.is_dir() else Path()
    if not directory.is_dir():
        raise InvalidRequest(f"{directory} is not a directory", hint="pass the checkpoint directory as --root")
    return directory.resolve()


def _print(directory: Path, limits: Limits, expected: list[Expectation]) -> None:
    out = console.out()
    how = (
        "bypassing the page cache (O_DIRECT)"
        if limits.direct
        else "through the page cache: this file system has no O_DIRECT"
    )
    table = console.table("LIMIT", "PER SECOND", "HOW", right=("PER SECOND",), wrap=("HOW",))
    table.add_row("copy in memory", console.human_bytes(limits.copy), "one thread; used when a save is staged")
    table.add_row("digest", console.human_bytes(limits.digest), "xxh3-64, one thread")
    table.add_row("durable write", console.human_bytes(limits.write), f"{directory}, {how}")
    table.add_row("the same, cores busy", console.human_bytes(limits.busy), "with digests, while every core computes")
    table.add_row("read", console.human_bytes(limits.read), "the same file, read from disk")
    out.print(table)
    out.print()
    seconds = ("STAGED", "DURABLE", "CORES BUSY", "RESTORED")
    rows = console.table("STATE OF THIS NODE", *seconds, right=seconds)
    for one in expected:
        times = (console.human_seconds(s) for s in (one.staged_s, one.durable_s, one.busy_s, one.restore_s))
        rows.add_row(console.human_bytes(one.bytes), *times)
    out.print(rows)
    out.print(
        Text(
            "save() returns at once: the state is staged while the next step computes. Training waits for the "
            "disk only if saves come faster than they become durable. CORES BUSY: until a save is durable while data "
            "loaders or other programs compute on every core.",
            "dim",
        )
    )
