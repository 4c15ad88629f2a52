"""Read a root: its runs and their checkpoints. The directory is the truth, and the catalog follows it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from holdfast_files.opened import open_checkpoint
from holdfast_formats import naming
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import CheckpointError, CorruptManifest, Damaged, NoSuchCheckpoint, NotCommitted
from holdfast_formats.files import Files
from holdfast_formats.rest import bodies
from holdfast_formats.rest.access import ALL
from holdfast_formats.timestamps import utc_now
from holdfast_service.control.catalog import run_settings
from holdfast_service.control.catalog.catalog import Catalog, KnownRun
from holdfast_service.control.catalog.pages import PAGE_ITEMS_MAX
from holdfast_service.control.catalog.run_settings import RunSettings
from holdfast_service.control.checkpoints import launch_records, shared_files
from holdfast_service.control.checkpoints.run_files import RunFile, read_run_file
from holdfast_service.control.database.visible import limited_to
from holdfast_service.storage import Store


class Unreadable(NamedTuple):
    """An unreadable checkpoint, listed as damaged if at all; or the run file, where `step` is None."""

    run: str
    step: int | None
    error: CheckpointError


class NegativeCache:
    """Since when listed steps are missing from the directory. Thread-safe.

    Where several nodes serve a root, this one may not see yet what another one has published: a network file system's client
    caches names for a while. So only what stays missing counts as gone.
    """

    def __init__(self, patience_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        """Steps are gone when they have been missing for `patience_s` seconds."""
        self.patience_s, self._clock = patience_s, clock
        self._lock = threading.Lock()
        self._since: dict[tuple[str, int], float] = {}

    def gone(self, run: str, missing: Collection[int]) -> set[int]:
        """Which of the missing steps of a run have been missing for long enough. All others of it are reset."""
        now = self._clock()
        with self._lock:
            known = {step: since for (of, step), since in self._since.items() if of == run and step in missing}
            self._since = {key: since for key, since in self._since.items() if key[0] != run}
            since = {step: known.get(step, now) for step in missing}
            self._since |= {(run, step): at for step, at in since.items()}
        return {step for step, at in since.items() if now - at >= self.patience_s}


class _Comparison(NamedTuple):
    """How the catalog is compared with the directories."""

    absences: NegativeCache
    thorough: bool = False
    is_known: bool = False  # that the catalog is not an older one, which lists what was removed since


def runs(tier: Files) -> list[str]:
    """The names of all runs below the root: directories with a run's name that hold checkpoints/ or run.json."""
    marks = {naming.CHECKPOINTS, naming.RUN_FILE}
    return [name for name in tier.list("") if naming.is_run_name(name) and marks & set(tier.list(name))]


def stands(tier: Files, run: str, step: int) -> bool:
    """Whether a checkpoint of this step stands in the directory."""
    return tier.size(f"{naming.checkpoint_path(run, step)}/{naming.COMMIT}") is not None


def committed(store: Store, run: str) -> list[int]:
    """The steps of a run with a COMMIT file, valid or not, ascending."""
    return [step for step in store.steps(run) if has_commit(store, run, step)]


def has_commit(store: Store, run: str, step: int) -> bool:
    """Whether a COMMIT file exists."""
    return store.files.size(f"{naming.checkpoint_path(run, step)}/{naming.COMMIT}") is not None


def agrees(store: Store, catalog: Catalog, run: str) -> bool:
    """Whether the catalog lists exactly the steps of a run that have a COMMIT."""
    listed = {checkpoint.step for checkpoint in all_checkpoints(catalog, run)}
    return set(committed(store, run)) <= listed <= set(store.steps(run))


def load_manifest(tier: Files, run: str, step: int) -> Manifest:
    """The manifest of a checkpoint, in the order of I5: COMMIT first.

    Raises `NoSuchCheckpoint` when there is no directory, `NotCommitted` when COMMIT is missing or unreadable, and
    `CorruptManifest` when the manifest is missing, is not what COMMIT states, or belongs to another run or step.
    """
    directory = naming.checkpoint_path(run, step)
    try:
        manifest = open_checkpoint(tier, directory).manifest
    except (NotCommitted, CorruptManifest):
        if tier.list(directory):
            raise
        raise NoSuchCheckpoint(f"{run} has no checkpoint of step {step}", hint=f"`holdfast ls {run}` lists them") from None
    if (manifest.run, manifest.step) != (run, step):
        raise CorruptManifest(
            f"{directory} contains {manifest.run}@{manifest.step}",
            hint=f"it was moved or copied: rename it to {naming.checkpoint_path(manifest.run, manifest.step)}",
            file=naming.MANIFEST,
        )
    return manifest


def reconcile(
    store: Store, catalog: Catalog, thorough: bool = False, absences: NegativeCache | None = None
) -> list[Unreadable]:
    """Update the catalog from the directories; return what is on disk but cannot be listed.

    Found checkpoints become listed, unverified; unchanged ones keep their state; missing ones are delisted. Unreadable ones
    stay listed, or become listed, as damaged, and what was not removed through Holdfast and is newer than all that stand is
    recorded as lost: nothing vanishes silently. A known run stays known without a directory: its attempt numbers still fence
    off older writers (I6). COMMIT and manifest with unchanged stamps are not read again unless this is `thorough`. With
    `absences`, missing steps are gone only when those say so.

    All runs are read, whatever request is the reason: to a token that sees a few, all others would look new.
    """
    with limited_to(ALL):
        return _reconcile(store, catalog, _Comparison(absences or NegativeCache(), thorough))


def _reconcile(store: Store, catalog: Catalog, how: _Comparison) -> list[Unreadable]:
    problems: list[Unreadable] = []
    known, on_disk = catalog.known_runs(), runs(store.files)
    for run in on_disk:
        problems += _reconcile_run(store, catalog, run, known.get(run), how)
    settings = run_settings.known(catalog)
    for run in on_disk:
        if (said := settings_of(store.files, run)) is not None and said != settings.get(run, RunSettings()):
            run_settings.note(catalog, run, said)
    for run in known.keys() - set(on_disk):
        if listed := catalog.stamps(run):  # also of a run that had its first checkpoint since it was looked for
            gone = how.absences.gone(run, listed.keys() - set(store.steps(run)))
            catalog.relist(run, {step: listed[step] for step in gone}, [], {}, utc_now(), how.is_known)
    return problems


def settings_of(tier: Files, run: str, file: RunFile | None = None) -> RunSettings | None:
    """The settings in the run's files, or in this run file; None where it cannot be read."""
    try:
        file = file or read_run_file(tier, run)
    except CheckpointError:
        return None
    launches = launch_records.read(tier, run) if not file.owner or file.tags is None else []
    owner = file.owner or launch_records.owner_of(launches)
    tags = launch_records.tags_of(launches) if file.tags is None else file.tags
    seen = (file.acknowledged or None, file.acknowledged_by or None, file.acknowledged_at or None)
    return RunSettings(owner, tags, file.archived or None, *seen)


def stamp(store: Store, run: str, step: int) -> str | None:
    """A stamp of a checkpoint's COMMIT and manifest; None without them."""
    return store.stamps(run, step).get(step)


def unlisted(store: Store, catalog: Catalog) -> list[tuple[str, int]]:
    """Checkpoint directories that the catalog does not list, because COMMIT or manifest cannot be read."""
    pairs: list[tuple[str, int]] = []
    for run in runs(store.files):
        listed = {checkpoint.step for checkpoint in all_checkpoints(catalog, run)}
        pairs += [(run, step) for step in store.steps(run) if step not in listed]
    return pairs


def _reconcile_run(store: Store, catalog: Catalog, run: str, known: KnownRun | None, how: _Comparison) -> list[Unreadable]:
    problems: list[Unreadable] = []
    keep_last = known.keep_last if known is not None else None
    try:
        if naming.RUN_FILE in store.files.list(run):
            keep_last = read_run_file(store.files, run).in_force.last
    except CheckpointError as error:
        problems.append(Unreadable(run, None, error))
    if known is None or keep_last != known.keep_last:
        catalog.set_keep_last(run, keep_last)
    return problems + _relist(store, catalog, run, how)


def list_run(store: Store, catalog: Catalog, run: str, absences: NegativeCache | None = None) -> list[Unreadable]:
    """As `reconcile`, for one run, in a catalog that has heard of every removal: all others are recorded as losses."""
    how = _Comparison(absences or NegativeCache(), is_known=True)
    problems = _reconcile_run(store, catalog, run, catalog.known_runs().get(run), how)
    if (said := settings_of(store.files, run)) is not None:
        run_settings.note(catalog, run, said)
    return problems


class ProbeResult(NamedTuple):
    """The comparison of a run's directories with the catalog: unchanged ones, and those to read."""

    stands: set[int]
    unread: list[int]
    stamps: dict[int, str]


def look(store: Store, run: str, listed: Mapping[int, str | None], thorough: bool = False) -> ProbeResult:
    """Compare the run's directories with the stamps of what is `listed`; all are to be read if `thorough`."""
    now = store.stamps(run)
    steps = store.steps(run)
    stamps = {step: now[step] for step in steps if step in now}
    stands = {step for step in stamps if not thorough and listed.get(step) == stamps[step]}
    return ProbeResult(stands, [step for step in steps if step not in stands], stamps)


def _relist(store: Store, catalog: Catalog, run: str, how: _Comparison) -> list[Unreadable]:
    """List the checkpoints of the run's directory, reading the changed ones."""
    problems: list[Unreadable] = []
    before = catalog.stamps(run)
    stands, unread, stamps = look(store, run, before, how.thorough)
    listed = {checkpoint.step: checkpoint for checkpoint in all_checkpoints(catalog, run)} if before and unread else {}
    listed_now: list[tuple[bodies.CheckpointInfo, str | None]] = []
    again: dict[int, str | None] = {}
    damaged: list[tuple[bodies.CheckpointInfo, Damaged]] = []
    described = {} if how.thorough else store.described(run, unread)
    for step in unread:
        try:
            stated = described.get(step) or bodies.describe(load_manifest(store.files, run, step))
        except NoSuchCheckpoint:
            continue  # removed at this moment
        except CheckpointError as error:
            problems.append(Unreadable(run, step, error))
            known = listed.get(step) or _unreadable(store.files, run, step)
            if known is not None and isinstance(error, Damaged):
                damaged.append((known, error))
            continue
        if (
            step in listed
            and bodies.as_committed(listed[step]) == bodies.as_committed(stated)
            and not was_unreadable(listed[step])
        ):
            again[step] = stamps.get(step)
        else:
            listed_now.append((stated, stamps.get(step)))
    kept = stands | again.keys() | {checkpoint.step for checkpoint, _ in damaged}
    # Also one that is found again as another: what was found out of the one before does not hold for this one.
    replaced = {checkpoint.step for checkpoint, _ in listed_now}
    missing = how.absences.gone(run, before.keys() - kept - replaced)
    gone = {step: before[step] for step in before if step in replaced or step in missing}
    if gone or listed_now or again:
        catalog.relist(run, gone, listed_now, again, utc_now(), how.is_known)
        shared_files.look(store, catalog.database, run, may_share=bool(listed_now))
    for checkpoint, damage in damaged:
        _list_damaged(catalog, checkpoint, damage, before)
    # Not a damaged one that was listed before: if it is gone, the next comparison finds and records that.
    new = [*replaced, *(checkpoint.step for checkpoint, _ in damaged if checkpoint.step not in before)]
    for step in _removed(store, run, new):
        catalog.forget_checkpoint(run, step)  # it had been forgotten before it was listed here
    return problems


def _removed(store: Store, run: str, steps: Collection[int]) -> list[int]:
    """Which of these steps are gone from the directory meanwhile."""
    standing = set(store.steps(run)) if steps else set()
    return [step for step in steps if step not in standing]


def _list_damaged(catalog: Catalog, known: bodies.CheckpointInfo, error: Damaged, before: Mapping[int, str | None]) -> None:
    """While a step is replaced or repaired, its COMMIT and manifest may be read of two checkpoints: one listed again since
    `before` stays.
    """
    problem = {**error.problem(), "run": known.run, "step": known.step}
    if known.damage != problem:
        catalog.list_damaged(known.model_copy(update={"verified": False, "damage": problem}), before)


def _unreadable(tier: Files, run: str, step: int) -> bodies.CheckpointInfo | None:
    """A row for a checkpoint whose COMMIT or manifest is damaged; None where it has neither."""
    directory = naming.checkpoint_path(run, step)
    if not {naming.COMMIT, naming.MANIFEST} & set(tier.list(directory)):
        return None
    sizes = [tier.size(f"{directory}/{name}") or 0 for name in tier.list(directory)]
    return bodies.CheckpointInfo(
        run=run,
        step=step,
        attempt=0,
        created="",
        world=0,
        groups=[],
        tensors=0,
        files=len(sizes),
        bytes=sum(sizes),
        metrics={},
        verified=False,
    )


def was_unreadable(known: bodies.CheckpointInfo) -> bool:
    """Whether it was marked because of COMMIT or manifest; those can be read now, so all else is checked again."""
    return known.damage is not None and known.damage.get("file") in (naming.COMMIT, naming.MANIFEST)


def all_checkpoints(catalog: Catalog, run: str) -> list[bodies.CheckpointInfo]:
    items: list[bodies.CheckpointInfo] = []
    cursor = None
    while True:
        page = catalog.checkpoints(run, cursor, PAGE_ITEMS_MAX)
        items += page.items
        cursor = page.next
        if cursor is None:
            return items
