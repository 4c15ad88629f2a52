"""Checks before a whole run is deleted, and its removal from the catalog."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from sqlalchemy import delete, select, update

from holdfast_formats import naming
from holdfast_formats.errors import Damaged, InUse, NoSuchCheckpoint, Pinned
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.listing import GOING_ON
from holdfast_service.control.checkpoints import removal, roots
from holdfast_service.control.database.cluster_schema import NodeRanksRow, SpeakerRow
from holdfast_service.control.database.run_rows import lock_run
from holdfast_service.control.database.schema import (
    AcknowledgementRow,
    AnswerRow,
    AttemptRow,
    CheckpointRow,
    JobRow,
    ReplicaRow,
    RoundRow,
    StatisticsRow,
)
from holdfast_service.control.retention import protecting_links
from holdfast_service.control.retention.rotation import Rotation
from holdfast_service.storage import Store

SHOWN_MAX = 5
OF_A_RUN = (AcknowledgementRow, AnswerRow, AttemptRow, CheckpointRow, RoundRow, SpeakerRow, StatisticsRow)


def refuse(catalog: Catalog, rotation: Rotation, run: str, marked: bool) -> None:
    """Raise `Pinned` or `InUse`, with the reason, unless the run may be deleted. Call it while deciding."""
    file = rotation.files.read(run)
    steps = {*file.pins, *(step for labelled in file.labels.values() for step in labelled)}
    if steps and not marked:
        raise Pinned(
            f"{len(steps)} checkpoints of {run} are pinned or labelled: {_some(steps)}",
            hint="unpin them, or delete them too: --pinned (marked=true)",
        )
    linked = protecting_links.standing(file, run)
    if linked.by_step or linked.unseen:
        where = _some([*linked.by_step.values(), *linked.unseen])
        raise Pinned(
            f"links point, or may point, to checkpoints of {run}: {where}", hint="remove the links, or mount their disk"
        )
    read = [step for step in rotation.readers.held(run, opened=False) if not rotation.readers.only_checked(run, step)]
    if read:
        raise InUse(f"checkpoints of {run} are being read: {_some(read)}", hint="try again when the readers have finished")
    if not marked:
        refuse_lone_copies(catalog, rotation, run)
    going_on(catalog, run)


def refuse_lone_copies(catalog: Catalog, rotation: Rotation, run: str) -> None:
    """`Pinned` where a copy in a replica is the only one of a checkpoint known to be sound: copies go with their run, and
    the trash would keep only a damaged one, or nothing. Soundness is checked in storage.
    """
    stands = (CheckpointRow.run == run, CheckpointRow.verified, CheckpointRow.damage.is_(None))
    sound = select(CheckpointRow.step).where(*stands)
    copied = select(ReplicaRow.step).where(ReplicaRow.run == run, ReplicaRow.state == "present")
    with catalog.database.read() as session:
        alone = set(session.scalars(copied.where(ReplicaRow.step.not_in(sound))))
        both = set(session.scalars(copied.where(ReplicaRow.step.in_(sound))))
    alone |= {step for step in both if not rotation.proofs.stands(run, step)}
    if alone:
        raise Pinned(
            f"{len(alone)} checkpoints of {run} are known to be sound only in replicas: {_some(alone)}",
            hint="verify or repair them first (`holdfast verify`, `holdfast repair`), or delete the copies too: --pinned "
            "(marked=true)",
        )


def going_on(catalog: Catalog, run: str) -> None:
    """`InUse` while any node works on the run."""
    if reasons := list(_going_on(catalog, run)):
        raise InUse(f"{run} is in use: {', '.join(reasons)}", hint="try again when that has ended, or stop it")


def refuse_foreign(store: Store, run: str) -> None:
    """`InUse` for a run with foreign files. It reads every manifest: call it before deciding, not while."""
    if foreign := _some(_foreign(store, run)):
        raise InUse(
            f"{run} contains files that Holdfast did not write: {foreign}",
            hint="move them away; Holdfast removes only files that it wrote",
        )


def forget(catalog: Catalog, run: str, heir: str | None = None) -> None:
    """Delete the run from the catalog, except for copies in replicas, which are removed like those of any removed
    checkpoint; the run's row goes with the last one. Sound copies of a renamed run stay until its `heir` has them.
    """
    with catalog.database.write() as session:
        row = lock_run(session, run)
        for table in OF_A_RUN:
            session.execute(delete(table).where(table.run == run))
        copies = update(ReplicaRow)
        if heir is not None:
            session.execute(copies.where(ReplicaRow.run == run, ReplicaRow.state == "present").values(heir=heir))
            session.execute(copies.where(ReplicaRow.heir == run).values(heir=heir))  # it was renamed before
        session.execute(copies.where(ReplicaRow.run == run).values(state="gone"))
        if session.scalar(select(ReplicaRow.step).where(ReplicaRow.run == run).limit(1)) is None:
            session.delete(row)
            return
        row.forget()


def _going_on(catalog: Catalog, run: str) -> Iterator[str]:
    with catalog.database.read() as session:
        for job in session.scalars(select(JobRow).where(JobRow.run == run, JobRow.state.in_(("queued", "running")))):
            yield f"job {job.id} ({job.kind})"
        for step in session.scalars(select(RoundRow.step).where(RoundRow.run == run, RoundRow.state.in_(GOING_ON))):
            yield f"step {step} is being saved"
        for node in session.scalars(select(NodeRanksRow.node).where(NodeRanksRow.run == run, NodeRanksRow.ranks > 0)):
            yield f"ranks are connected to the node {node}"


def _foreign(store: Store, run: str) -> list[str]:
    files = store.files
    names_found = [
        f"{run}/{name}" for name in files.list(run) if name not in removal.OF_A_RUN and not removal.is_half_written(name)
    ]
    directory = f"{run}/{naming.CHECKPOINTS}"
    names_found += [f"{directory}/{name}" for name in files.list(directory) if naming.parse_step_directory(name) is None]
    for step in store.steps(run):
        try:
            names = removal.foreign_files(files, roots.load_manifest(files, run, step))
        except (Damaged, NoSuchCheckpoint):
            continue  # as with every removal: damage must not keep anything for ever
        names_found += [f"{naming.checkpoint_path(run, step)}/{name}" for name in names]
    return names_found


def _some(what: Collection[int] | Collection[str]) -> str:
    items = [str(one) for one in sorted(what)]
    more = f" and {len(items) - SHOWN_MAX} more" if len(items) > SHOWN_MAX else ""
    return ", ".join(items[:SHOWN_MAX]) + more
