"""A complete restore: choose a step, open it, load it, and report the result to the daemon.

The daemon chooses one step for all ranks, and each rank reports its result before it continues. If a rank finds damage,
all ranks of the launch take the previous step. Without a daemon, only a single rank can fall back.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from typing import NamedTuple

from holdfast.left_out import LeftOutNote
from holdfast.link.session import Choice, RestoreVerdictReply, Session
from holdfast.memory import gc_pause
from holdfast.read.overwrite_guard import OVERWRITTEN
from holdfast.read.reader import REPLACED_MAX, CheckpointReader
from holdfast.restore.load import RestoreReport, RestoringRank, WantedPart, load
from holdfast.state.train_state import MASTER
from holdfast.tensors.leaves import is_ignored
from holdfast_files.opened import read_placement
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.disk.thinning import USABLE_FOR
from holdfast_formats.errors import CheckpointError, CheckpointsMissing, CheckpointThinned, Damaged, InUse, StateMismatch


def refuse(manifest: Manifest, choice: Choice, groups: Collection[str]) -> None:
    """`CheckpointThinned` if the checkpoint lost one of these groups, with the nearest step that has all."""
    gone = [group for group in groups if manifest.thinned is not None and group in manifest.thinned.groups]
    if not gone or manifest.thinned is None:
        return
    left = tuple(group for group in groups if group not in gone)
    nearest = _nearest(manifest.run, manifest.step, choice, groups)
    whole = "no step still has all of them" if nearest is None else f"the nearest step that still has them is {nearest}"
    masters = ', masters="from-model"' if "master" in gone or "optim" in gone else ""
    weights = "it still has its weights"
    if left:
        weights = f"restore(step={manifest.step}, groups={left}{masters}) restores its weights"
    lost = f"was thinned at {manifest.thinned.at}, and no longer has {', '.join(gone)}"
    raise CheckpointThinned(
        f"{manifest.run}@{manifest.step} {lost}: it can be used only for {USABLE_FOR}",
        hint=f"{whole}; {weights}",
        groups=gone,
        nearest=nearest,
    )


def _nearest(run: str, step: int, choice: Choice, groups: Collection[str]) -> int | None:
    with suppress(CheckpointError):  # whatever is wrong there, the refusal is the news
        steps = (found for found, held in _offers(run, step, choice) if set(groups) <= set(held))
        return _closest(steps, step)
    return None


def _offers(run: str, step: int, choice: Choice) -> Iterator[tuple[int, Collection[str]]]:
    """Steps and their groups; from the root the closest first."""
    if choice.root is None:
        if choice.url is not None:
            from holdfast.rest.api import Api  # a trainer starts without httpx

            with Api(choice.url) as api:
                yield from (
                    (checkpoint.step, checkpoint.groups) for checkpoint in api.checkpoints(run) if checkpoint.damage is None
                )
        return
    for checkpoint in sorted(choice.root.committed_steps(run), key=lambda other: abs(other - step)):
        with suppress(Damaged), closing(choice.root.source(run, checkpoint)) as source:
            yield checkpoint, read_placement(source).groups


def _closest(steps: Iterable[int], step: int) -> int | None:
    return min(steps, key=lambda other: abs(other - step), default=None)


log = logging.getLogger(__name__)

LATE = "other ranks already continue from this step: stop this launch; the next one restores an older step"
NO_DAEMON = (
    "with no daemon, ranks cannot agree on another step: start `holdfast serve` on this directory, or restore(step=…)"
)


class RestoreRequest(NamedTuple):
    """What to restore: a step by number, or the newest checkpoint with these groups."""

    step: int | None
    groups: tuple[str, ...]
    part: WantedPart
    training: bool  # goes on from what it restores, so that a daemon is there for it sooner or later
    healthy: bool = False  # the newest without new NaN or infinities, where no step is named


def needed_groups(wanted: Collection[str], part: WantedPart, needs: Collection[str]) -> tuple[str, ...]:
    """The groups that a checkpoint must have for this part of the `wanted` groups, and those that it `needs` besides."""
    needed = [group for group in wanted if not is_ignored(group, part.exclude)]
    if part.groups is None and part.masters is not None:
        needed = [group for group in needed if group != MASTER]  # where there are none, the weights make them
    return tuple(dict.fromkeys((*needed, *needs)))


def restore(rank: RestoringRank, asked: RestoreRequest) -> RestoreReport | None:
    """Load the requested step, or the newest sound step below a damaged one; None if there is no checkpoint.

    A step that was requested by number is loaded or raises. Raises what `load` raises, and `Damaged` if no sound step
    is left or the ranks cannot agree.
    """
    damages: list[tuple[int, CheckpointError]] = []  # that this restore has met, the newest step first
    below: int | None = None
    while True:
        choice = _chosen(rank, asked, below, damages)
        if choice.step is None:
            if damages:
                raise damages[0][1]  # never start from nothing because of damage
            return None
        report, own, judged = _load(rank, choice, asked)
        if judged.error is None and report is not None:
            return _told(rank.session, report, [*choice.notes, *_unsaid(damages, choice)])
        error = own or judged.error
        assert error is not None
        if own is None:  # this rank has all of a step that another one could not read
            rank.state.wholeness.take_back()
            error.hint = OVERWRITTEN
        damages.append((choice.step, error))
        if asked.step is not None:
            if judged.newest is not None:
                error.hint = f"{error.hint}; the newest step that is not known to be damaged is {judged.newest}"
            raise error
        if judged.late:
            error.hint = f"{error.hint}; {LATE if choice.turn is not None else NO_DAEMON}"
            raise error
        log.warning("step %d is damaged, looking for an older one: %s", choice.step, error.detail)
        below = choice.step


def _chosen(
    rank: RestoringRank, asked: RestoreRequest, below: int | None, damages: list[tuple[int, CheckpointError]]
) -> Choice:
    try:
        return _choose(rank.session, asked, asked.training and rank.launch.world > 1, below)
    except CheckpointsMissing as missing:  # of copies it says more than the damage that was met
        if rank.state.wholeness.torn:
            missing.hint = f"{missing.hint}; {OVERWRITTEN}"
        raise
    except (Damaged, StateMismatch):
        if damages:
            raise damages[0][1] from None  # it knows what became of live tensors
        raise


def _choose(session: Session, asked: RestoreRequest, start: bool, below: int | None) -> Choice:
    try:
        found = session.choose(asked.step, asked.groups, start, below, asked.healthy)
        if found.step is None and found.turn is None and below is None and asked.training and session.has_catalog:
            return session.choose(asked.step, asked.groups, True, below, asked.healthy)  # which knows what was there
        return found
    except StateMismatch as lacking:
        offered, missing = (tuple(lacking.members.get(name, ())) for name in ("offered", "missing"))
        if asked.part.strict or not offered:  # without `strict`, the most of the groups that there is will do
            raise
        choice = session.choose(asked.step, offered, start, below, asked.healthy)
        lacked = LeftOutNote(f"no checkpoint has all groups of the live state; not restored: {', '.join(missing)}")
        return choice._replace(notes=(*choice.notes, lacked))


def _load(
    rank: RestoringRank, choice: Choice, asked: RestoreRequest
) -> tuple[RestoreReport | None, Damaged | None, RestoreVerdictReply]:
    """Load, again if the daemon reports that the step is sound now. Returns the report, the damage and the verdict."""
    session, named, replaced = rank.session, asked.step is not None, 0
    while True:
        restore_report: RestoreReport | None = None
        error: Damaged | None = None
        passed_over: dict[str, CheckpointError] = {}
        notes: list[str] = []
        try:
            with gc_pause.paused(), _opened(rank, choice, passed_over, notes) as reader:
                if asked.part.strict:
                    refuse(reader.manifest, choice, asked.groups)
                restore_report = load(reader, rank, asked.part)
                notes += _of_copies(passed_over, restore_report)
                restore_report = restore_report._replace(notes=(*restore_report.notes, *notes))
        except Damaged as damage:
            error = damage
        except Exception as failure:
            if isinstance(failure, InUse) and replaced < REPLACED_MAX:  # the directory holds the same step, replaced
                replaced += 1
                continue
            own = (
                failure if isinstance(failure, CheckpointError) else CheckpointError(f"{type(failure).__name__}: {failure}")
            )
            session.ended(choice, own, alone=True)  # it is this rank's own matter: the others do not wait for it
            raise
        judged = session.ended(choice, error, named, passed_over)
        if not judged.again:
            for note in notes:
                session.warn(note)
            return restore_report, error, judged


def _opened(
    rank: RestoringRank, choice: Choice, passed_over: dict[str, CheckpointError], notes: list[str]
) -> CheckpointReader:
    """Open the checkpoint; where only copies have it that this rank cannot read, once it is in the root."""
    try:
        return choice.open(rank.run, passed_over)
    except Damaged:
        raise
    except CheckpointError as error:
        if not choice.copies:
            raise
        log.warning("step %d is copied back to the root, for this rank cannot read it elsewhere: %s", choice.step, error)
        notes += [f"{_named(name)} could not be read from here ({error.detail})" for name, error in passed_over.items()]
        passed_over.clear()
        return rank.session.brought(choice)._replace(copies=()).open(rank.run, passed_over)


def _of_copies(passed_over: Mapping[str, CheckpointError], restore_report: RestoreReport) -> list[str]:
    """Notes on nearer copies that were passed over, all or in part, and where the bytes came from instead."""
    came = ", ".join(f"{size:,} bytes from {origin}" for origin, size in restore_report.bytes_by.items() if size)
    return [f"{_named(name)} was passed over ({error.detail}): {came}" for name, error in passed_over.items()]


def _named(copy: str) -> str:
    return f"the copy in {copy}" if copy else "the checkpoint in the root"


def _unsaid(damages: list[tuple[int, CheckpointError]], choice: Choice) -> list[str]:
    """Notes for a restore without a daemon; a daemon's own notes name the damaged steps."""
    if choice.turn is not None:
        return []
    return [f"step {step} is damaged ({error.detail}): restored step {choice.step} instead" for step, error in damages]


def _told(session: Session, restore_report: RestoreReport, notes: list[str]) -> RestoreReport:
    for note in notes:
        if not isinstance(note, LeftOutNote):  # the restore reports these with its other notes
            session.warn(note)
    return restore_report._replace(notes=(*restore_report.notes, *notes))
