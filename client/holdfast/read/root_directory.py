"""Choose among a run's checkpoints in a root, and open one from there or over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from holdfast.read.checkpoint_root import CheckpointRoot, mapped
from holdfast.read.copies import CheckpointCopy, OtherCopies
from holdfast.read.directory_root import DirectoryRoot
from holdfast.read.reader import CheckpointReader
from holdfast.read.sources import HttpSource, Source
from holdfast_files.objects import address
from holdfast_files.opened import read_placement
from holdfast_formats import lineage
from holdfast_formats.errors import (
    CheckpointError,
    DaemonGone,
    Damaged,
    Denied,
    InvalidRequest,
    NoSuchCheckpoint,
    NoSuchRun,
    NotFound,
)
from holdfast_formats.lineage import PlacedCheckpoint


def open_checkpoint(
    root: CheckpointRoot | Path | None, url: str | None, run: str, step: int, served: str = ""
) -> CheckpointReader:
    """Open the checkpoint from its root (a path: its directory) if that can be read here, otherwise over HTTP from the
    daemon. `served` is the root of the daemon, if it is on this machine.
    """
    source = source_at(root, url, run, step, served)
    try:
        return CheckpointReader.open(source)
    except (DaemonGone, Denied) as error:
        if not isinstance(source, HttpSource):
            raise
        if not served:
            raise
        raise type(error)(
            f"cannot read {run}@{step}: the daemon's root {served} is not visible here, and over HTTP: {error.detail}",
            hint=_mount(served),
        ) from error


def source_at(root: CheckpointRoot | Path | None, url: str | None, run: str, step: int, served: str = "") -> Source:
    """The files of the checkpoint as `open_checkpoint` reads them; `NoSuchCheckpoint` if they cannot be read from here."""
    root = DirectoryRoot(root) if isinstance(root, Path) else root
    is_there = root is not None and root.has(run, step)
    if root is not None and (is_there or url is None):
        if not is_there:
            raise NoSuchCheckpoint(
                f"{root.label} has no checkpoint {run}@{step}", hint="`holdfast ls` lists the available checkpoints"
            )
        return root.source(run, step)
    if url is None:
        raise NoSuchCheckpoint(
            f"cannot read {run}@{step}: the daemon's root {served} is not visible here, and the daemon does "
            "not listen for HTTP",
            hint=_mount(served),
        )
    from holdfast.rest.api import Api  # a listing of a directory starts without httpx

    return HttpSource(Api(url), run, step)


class CheckpointIdentity(NamedTuple):
    """Run and step of a checkpoint, and when it was saved, if that is known: another one may have both."""

    run: str
    step: int
    created: str = ""


def open_nearest(
    copies: Sequence[CheckpointCopy], which: CheckpointIdentity, problems: dict[str, CheckpointError]
) -> CheckpointReader:
    """Open the checkpoint in the first of these copies that can be opened; what that one lacks is read from those behind it.

    Adds the problems of copies that are passed over, by name; a copy that does not exist is no problem. Raises the first
    problem if none can be opened, or else that the first copy does not exist.
    """
    absent: CheckpointError | None = None
    for at, copy in enumerate(copies):
        try:
            others = OtherCopies(copy.name, copies[at + 1 :], problems)
            return _of(CheckpointReader.open(copy.open(), complete=False, others=others), which)
        except NotFound as error:
            absent = absent or error
        except CheckpointError as error:
            problems[copy.name] = error
    raise next(
        iter(problems.values()),
        absent
        or NoSuchCheckpoint(f"there is no copy of {which.run}@{which.step}", hint="`holdfast ls RUN` shows its steps"),
    )


def _of(reader: CheckpointReader, which: CheckpointIdentity) -> CheckpointReader:
    manifest = reader.manifest
    if which in ((manifest.run, manifest.step, manifest.created), (manifest.run, manifest.step, "")):
        return reader
    reader.close()
    what = f"{manifest.run}@{manifest.step} of {manifest.created}"
    raise NoSuchCheckpoint(
        f"{reader.source.label} has {what}, which is another checkpoint",
        hint="the copy was replaced meanwhile: run the command again",
    )


def _mount(served: str) -> str:
    if address.is_address(served):
        return "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, to keys that may read the bucket"
    return (
        f"mount {served} at the same path here, readable for this user (read-only is enough); or give an "
        "address that can be reached from here: at=URL"
    )


def listed_steps(root: CheckpointRoot | None, url: str | None, run: str, served: str = "") -> list[int]:
    """The committed steps of a run, newest first, from the root if that can be read here, otherwise over HTTP.

    Damaged steps are among them. Raises `InvalidRequest` if neither can be reached.
    """
    if root is not None:
        return root.committed_steps(run)
    if url is None:
        raise InvalidRequest(
            f"cannot list the checkpoints of {run}: the daemon's root {served} is not visible here, and the daemon does "
            "not listen for HTTP",
            hint=_mount(served),
        )
    from holdfast.rest.api import Api  # a listing of a directory starts without httpx

    try:
        with Api(url) as api:
            return sorted((checkpoint.step for checkpoint in api.checkpoints(run)), reverse=True)
    except NoSuchRun:  # the run has no checkpoint yet
        return []


def living_steps(root: CheckpointRoot, run: str, among: Sequence[int] | None = None) -> list[int]:
    """The steps of `committed_steps`, or of `among`, that training has not abandoned by continuing from an older one."""
    steps = root.committed_steps(run) if among is None else among
    if len(steps) < 2:
        return list(steps)
    lines = dict(root.lines(run))
    read = _placements(root, run, [step for step in steps if step not in lines])
    newest = max((lines[step] for step in steps if step in lines), default=lineage.ROOT)
    if newest > lineage.line(lineage.way(read)):  # its checkpoints say how it was reached
        on_it = (_placement(root, run, step) for step in steps if lines.get(step) == newest)
        bearer = next((one for one in on_it if one is not None), None)
        if bearer is None or lineage.line(bearer.rewinds) != newest:
            lines, read = {}, _placements(root, run, steps)  # something else than Holdfast has changed the root
        else:
            read.append(bearer)
    way = lineage.way(read)
    lines |= {placement.step: lineage.line(placement.rewinds) for placement in read}
    return [step for step in steps if not way or step not in lines or lineage.leads(way, lines[step], step)]


def _placements(root: CheckpointRoot, run: str, steps: Sequence[int]) -> list[PlacedCheckpoint]:
    """Where these checkpoints are among others, without those that cannot be read."""
    return [one for one in mapped(root, lambda step: _placement(root, run, step), steps) if one is not None]


def _placement(root: CheckpointRoot, run: str, step: int) -> PlacedCheckpoint | None:
    if (described := root.described(run, step)) is not None:
        return described
    with suppress(Damaged), closing(root.source(run, step)) as source:
        return read_placement(source)
    return None  # loading it reports the damage
