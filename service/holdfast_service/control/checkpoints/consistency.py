"""Compare the catalog with the directories, and rebuild it from them. The directories are the truth.

Saves and removals may continue meanwhile: apparent contradictions are checked again, and only lasting ones count.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import NamedTuple

from sqlalchemy import delete, func, select, update

from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError, NoSuchCheckpoint
from holdfast_formats.rest import bodies
from holdfast_formats.rest.consistency import CONTRADICTIONS_MAX, CatalogCheck, CatalogRebuild, Contradiction, Kind
from holdfast_service.control.catalog.catalog import Catalog, KnownRun
from holdfast_service.control.catalog.listing import GOING_ON
from holdfast_service.control.checkpoints import roots
from holdfast_service.control.checkpoints.run_files import read_run_file
from holdfast_service.control.database.schema import AttemptRow, CheckpointRow, JobRow, RoundRow, RunRow, StatisticsRow
from holdfast_service.storage import Store

LOOK_AGAIN_S = (0.2, 1.0)  # a commit is listed, and a removal forgotten, within this
NO_WRITER = "no daemon writes it any more"
# Sums by layer outlive their checkpoint, for plots; what was known of its tensors does not.
_WITHOUT_CHECKPOINT = (
    StatisticsRow.data != b"",
    ~select(CheckpointRow.step)
    .where(CheckpointRow.run == StatisticsRow.run, CheckpointRow.step == StatisticsRow.step)
    .exists(),
)


class _Found(NamedTuple):
    items: dict[tuple[Kind, str | None, int | None, str], Contradiction]
    runs: int
    checkpoints: int
    read: int


def check(store: Store, catalog: Catalog, writers: Collection[str] = (), thorough: bool = False) -> CatalogCheck:
    """All lasting contradictions. `writers` are the nodes whose daemons are up, none when the service is down.

    Manifests are read where their stamp differs from the listed one, and all of them if `thorough`.
    """
    result = _look(store, catalog, writers, thorough)
    items = dict(result.items)
    for pause_s in LOOK_AGAIN_S if writers else ():
        if not items:
            break
        time.sleep(pause_s)
        again = _look(store, catalog, writers, thorough=False)
        # What only a thorough look finds does not come from saves that go on, so it is not looked for again.
        items = {key: item for key, item in items.items() if key in again.items or (thorough and item.kind == "differs")}
    return CatalogCheck(
        catalog=catalog.database.url,
        runs=result.runs,
        checkpoints=result.checkpoints,
        manifests_read=result.read,
        thorough=thorough,
        count=len(items),
        items=list(items.values())[:CONTRADICTIONS_MAX],
    )


def rebuild(store: Store, catalog: Catalog, writers: Collection[str], now: str) -> CatalogRebuild:
    """Rebuild the catalog from the directories, reading every manifest; rows that only the catalog has stay, where readable.

    Rounds and jobs of nodes that are gone end, or are queued again, at the time `now`, RFC 3339.
    """
    before = check(store, catalog, writers, thorough=True)
    roots.reconcile(store, catalog, thorough=True)
    _mend_rows(catalog, writers, now)
    after = check(store, catalog, writers)
    left = {(item.kind, item.run, item.step) for item in after.items}
    return CatalogRebuild(
        mended=[item for item in before.items if (item.kind, item.run, item.step) not in left],
        left=after.items,
        runs=after.runs,
        checkpoints=after.checkpoints,
    )


def _look(store: Store, catalog: Catalog, writers: Collection[str], thorough: bool) -> _Found:
    known, runs = catalog.known_runs(), set(roots.runs(store.files))
    items: list[Contradiction] = []
    checkpoints = read = 0
    for run in sorted(known.keys() | runs):
        listed = catalog.stamps(run)
        wrong, opened = _look_at_run(store, catalog, run, listed, thorough)
        items += wrong
        items += _look_at_run_file(store, run, known.get(run))
        checkpoints, read = checkpoints + len(listed), read + opened
    items += _look_at_rows(catalog, writers)
    keyed = {(item.kind, item.run, item.step, item.text): item for item in items}
    return _Found(keyed, len(known), checkpoints, read)


def _look_at_run(
    store: Store, catalog: Catalog, run: str, listed: dict[int, str | None], thorough: bool
) -> tuple[list[Contradiction], int]:
    """The contradictions of a run's listed checkpoints, and how many manifests were read."""
    look = roots.look(store, run, listed, thorough)
    items = []
    rows = (
        {checkpoint.step: checkpoint for checkpoint in roots.all_checkpoints(catalog, run)} if look.unread and listed else {}
    )
    for step in sorted(listed.keys() - look.stands - set(look.unread)):
        items.append(_one("listed-but-gone", run, step, "is listed, but its directory is gone"))
    for step in look.unread:
        try:
            manifest = bodies.as_committed(bodies.describe(roots.load_manifest(store.files, run, step)))
        except NoSuchCheckpoint:  # an empty directory, or removed meanwhile
            if step in listed:
                items.append(_one("listed-but-gone", run, step, "is listed, but its directory is gone"))
            continue
        except CheckpointError as error:
            if step in rows and rows[step].damage is not None:
                continue  # listed as damaged already
            kind: Kind = "listed-but-unreadable" if step in listed else "unreadable"
            items.append(_one(kind, run, step, f"cannot be read: {error.detail}"))
            continue
        if step not in listed:
            items.append(_one("not-listed", run, step, "is committed but not listed"))
        elif step in rows and (members := _differing(bodies.as_committed(rows[step]), manifest)):
            items.append(
                _one("differs", run, step, f"is listed with values that differ from its manifest: {', '.join(members)}")
            )
    return items, len(look.unread)


def _differing(listed: bodies.CheckpointInfo, manifest: bodies.CheckpointInfo) -> list[str]:
    listed_values, stated = listed.model_dump(), manifest.model_dump()
    return [name for name in listed_values if listed_values[name] != stated[name]]


def _look_at_run_file(store: Store, run: str, known: KnownRun | None) -> list[Contradiction]:
    if naming.RUN_FILE not in store.files.list(run):
        return []
    try:
        keep_last = read_run_file(store.files, run).in_force.last
    except CheckpointError as error:
        return [_one("unreadable", run, None, f"has a file that cannot be read: {error.detail}")]
    if known is None:
        return [_one("not-listed", run, None, "has a run file, but the run is not in the catalog")]
    if known.keep_last != keep_last:
        return [
            _one(
                "differs",
                run,
                None,
                f"keeps {keep_last} according to its run file, but {known.keep_last} according to the catalog",
            )
        ]
    return []


def _look_at_rows(catalog: Catalog, writers: Collection[str]) -> Iterable[Contradiction]:
    """Contradictions within the catalog."""
    with catalog.database.read() as session:
        for table in (CheckpointRow, AttemptRow, RoundRow):
            newest = func.max(table.attempt)
            behind = select(RunRow.name, RunRow.attempt, newest).join(table, table.run == RunRow.name)
            grouped = behind.group_by(RunRow.name, RunRow.attempt).having(newest > RunRow.attempt)
            for run, declared, used in session.execute(grouped):
                yield _one("fence-too-low", run, None, f"has attempt {used}, but the newest declared attempt is {declared}")
        for row in session.scalars(select(RoundRow).where(RoundRow.state.in_(GOING_ON)).order_by(RoundRow.id)):
            if _is_orphan(row.node, writers):
                yield _one("orphaned-round", row.run, row.step, f"has save {row.id} in state {row.state}: {NO_WRITER}")
        for job in session.scalars(select(JobRow).where(JobRow.state == "running").order_by(JobRow.id)):
            if job.node not in writers:
                text = f"has job {job.id} running on {job.node}, which is gone"
                yield _one("orphaned-job", job.run, job.step, text)
        for run, step in session.execute(select(StatisticsRow.run, StatisticsRow.step).where(*_WITHOUT_CHECKPOINT)):
            yield _one("statistics-of-nothing", run, step, "is not listed, but has tensor statistics")


def _mend_rows(catalog: Catalog, writers: Collection[str], now: str) -> None:
    with catalog.database.write() as session:
        for table in (CheckpointRow, AttemptRow, RoundRow):
            newest = select(func.max(table.attempt)).where(table.run == RunRow.name).scalar_subquery()
            session.execute(
                update(RunRow).where(newest > RunRow.attempt).values(attempt=newest),
                execution_options={"synchronize_session": False},
            )
        for row in session.scalars(select(RoundRow).where(RoundRow.state.in_(GOING_ON)).with_for_update()):
            if not _is_orphan(row.node, writers):
                continue
            listed = session.get(CheckpointRow, (row.run, row.step))
            if listed is not None and listed.attempt == row.attempt:  # its daemon ended before it recorded that
                row.end("committed", now)
            else:
                row.end("aborted", now, "round-aborted", NO_WRITER)
        for job in session.scalars(select(JobRow).where(JobRow.state == "running").with_for_update()):
            if job.node not in writers:
                job.requeue()
        session.execute(delete(StatisticsRow).where(*_WITHOUT_CHECKPOINT), execution_options={"synchronize_session": False})


def _is_orphan(node: str | None, writers: Collection[str]) -> bool:
    """Whether no running daemon writes the round; one without a node may belong to any running daemon."""
    return not writers if node is None else node not in writers


def _one(kind: Kind, run: str | None, step: int | None, text: str) -> Contradiction:
    about = "" if run is None else run if step is None else f"{run}@{step}"
    return Contradiction(kind=kind, run=run, step=step, text=f"{about} {text}".strip())
