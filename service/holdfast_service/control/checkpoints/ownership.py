"""Ownership of a catalog. It lists the checkpoints of one root; another root's daemon would delist them.

The first root that starts with a catalog owns it. A catalog without an owner row, by damage, goes to the root with its
checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from holdfast_formats.errors import CheckpointError, WrongRoot
from holdfast_formats.rest import bodies
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.recovery import file_of
from holdfast_service.control.checkpoints import roots
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.engines import without_password
from holdfast_service.control.database.schema import OwnerRow
from holdfast_service.storage import Store

_ONLY = 1
HINT = (
    "every root needs its own catalog: set another --catalog, or none. If this root was moved or restored from "
    "the other one and replaces it, stop the other daemon and run `holdfast catalog adopt --root DIR --catalog "
    "URL`"
)


class Root(NamedTuple):
    """A candidate owner: the root's id, its place as messages name it, the directory for what its daemon keeps, and the
    machine's name.
    """

    id: str
    label: str
    directory: Path
    node: str

    @property
    def told(self) -> tuple[str, str, str]:
        return self.id, self.label, self.node


def claim(store: Store, catalog: Catalog, root: Root, now: str) -> None:
    """Make this root the owner; `WrongRoot` if another one is, without changes.

    A catalog in the root's own directory belongs to it, also where the directory was copied.
    """
    if _lies_in(catalog.database.url, root.directory):
        adopt(catalog, root, now)
        return
    with catalog.database.read() as session:
        fresh = session.get(OwnerRow, _ONLY) is None
    if fresh and not _lists(store, catalog):
        raise WrongRoot(
            f"the catalog {without_password(catalog.database.url)} lists checkpoints that are not in {root.label}",
            hint=HINT,
        )
    with catalog.database.write() as session:
        row = _locked(session, root, now)
        _refuse_another(row, root.id, catalog.database)
        row.move_to(*root.told, row.since)


def check(database: Database, root_id: str, path: Path) -> None:
    """`WrongRoot` for the catalog of another root. Changes nothing."""
    if _lies_in(database.url, path):
        return
    with database.read() as session:
        row = session.get(OwnerRow, _ONLY)
        if row is not None:
            _refuse_another(row, root_id, database)


def adopt(catalog: Catalog, root: Root, now: str) -> str | None:
    """Make this root the owner in any case; returns the previous owner's path, None without one."""
    with catalog.database.write() as session:
        row = _locked(session, root, now)
        before = None if row.root == root.id else row.path
        if (row.root, row.path, row.node) != root.told:
            row.move_to(*root.told, now)
        return before


def _locked(session: Session, root: Root, now: str) -> OwnerRow:
    """The only row, created for this root if missing, locked until this transaction ends."""
    row = session.get(OwnerRow, _ONLY, with_for_update=True)
    if row is None:
        try:
            with session.begin_nested():
                session.add(OwnerRow(only=_ONLY, root=root.id, path=root.label, node=root.node, since=now))
        except IntegrityError:
            session.expire_all()  # the daemon of another root was faster
        row = session.get_one(OwnerRow, _ONLY, with_for_update=True)
    return row


def _refuse_another(row: OwnerRow, root_id: str, database: Database) -> None:
    if row.root != root_id:
        raise WrongRoot(
            f"the catalog {without_password(database.url)} belongs to another root: {row.path} on {row.node}, "
            f"since {row.since}",
            hint=HINT,
        )


def _lies_in(url: str, root: Path) -> bool:
    file = file_of(url)
    return file is not None and file.resolve().parent == root.resolve()


def _lists(store: Store, catalog: Catalog) -> bool:
    """Whether a catalog without an owner matches this root: some listed checkpoint exists there, or it lists none."""
    known = catalog.known_runs()
    listed = {run: stamps for run in known if (stamps := catalog.stamps(run))}
    if not listed:
        return known.keys() <= set(roots.runs(store.files))
    return any(_stands(store, catalog, run, stamps) for run, stamps in listed.items())


def _stands(store: Store, catalog: Catalog, run: str, stamps: dict[int, str | None]) -> bool:
    if roots.look(store, run, stamps).stands:
        return True
    unstamped = [step for step, stamp in stamps.items() if stamp is None]  # salvage believes no stamp
    return any(_is_listed_so(store, catalog, run, step) for step in unstamped)


def _is_listed_so(store: Store, catalog: Catalog, run: str, step: int) -> bool:
    try:
        stated = bodies.describe(roots.load_manifest(store.files, run, step))
    except CheckpointError:
        return False
    return bodies.as_committed(catalog.checkpoint(run, step)) == bodies.as_committed(stated)
