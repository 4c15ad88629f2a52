"""Checks and rebuilds a catalog whose root no daemon serves, or hands it over to another root."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from sqlalchemy import func, select

from holdfast_files.objects.address import is_address
from holdfast_formats.errors import RootBusy, StorageFailed
from holdfast_formats.rest.consistency import CatalogAdoption, CatalogCheck
from holdfast_formats.rest.offline import CatalogWork
from holdfast_formats.root_files import check_local
from holdfast_formats.timestamps import utc_now
from holdfast_service import config
from holdfast_service.control.access import audit
from holdfast_service.control.catalog import recovery
from holdfast_service.control.catalog.attempts import make_one
from holdfast_service.control.checkpoints import consistency, ownership
from holdfast_service.control.database.cluster_schema import NodeRow
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.engines import address
from holdfast_service.control.nodes import LEASE_S
from holdfast_service.control.retention import run_trash
from holdfast_service.offline.opened_root import opened, whereabouts
from holdfast_service.storage import RootStorage, Store
from holdfast_service.storage.identity import known, settle


def run(work: CatalogWork) -> dict[str, Any]:
    """The report. `RootBusy` while a daemon serves the root, which then must do it, and while daemons share the catalog."""
    if not is_address(work.root):
        check_local(work.root)
    settings = config.parse(["--root", work.root, *(["--catalog", work.catalog] if work.catalog else [])])
    place = settings.place
    if place.bucket is None and not place.directory.is_dir():
        raise StorageFailed(f"the directory {place.directory} does not exist", hint="pass the daemon's directory as --root")
    with opened(place, settings.node, alone=True) as storage:
        return _made(work.act, storage, settings).model_dump()


def _made(act: str, storage: RootStorage, settings: config.Config) -> BaseModel:
    place, url, store = settings.place, settings.catalog_url, storage.store
    root = place.directory
    shared = address(url) if config.is_shared(url) else None
    if act not in ("rebuild", "adopt"):
        return _checked(place, store, url, thorough=act == "check-thorough")
    if shared is not None and place.bucket is not None:
        _refuse_living(url, place.label)
    root_id = settle(storage.records, whereabouts(place), shared, leave=act == "adopt").mark.id
    who = ownership.Root(root_id, place.label, root, settings.node)
    opened = recovery.open_catalog(url, settings.node)
    try:
        if act == "adopt":
            before = ownership.adopt(opened.catalog, who, utc_now())
            if shared is None:
                make_one(storage.records)
            audit.offline(opened.catalog.database, settings.node, "catalog-adopted", target=place.label)
            return CatalogAdoption(catalog=opened.catalog.database.url, root=place.label, before=before)
        ownership.claim(store, opened.catalog, who, utc_now())
        run_trash.forget_deleted(storage.records, opened.catalog)
        result = consistency.rebuild(store, opened.catalog, writers=(), now=utc_now())
        audit.offline(opened.catalog.database, settings.node, "catalog-rebuilt")
    finally:
        opened.catalog.close()
    aside = None if opened.set_aside is None else str(opened.set_aside)
    return result.model_copy(update={"set_aside": aside, "salvaged": opened.salvaged})


def _refuse_living(url: str, label: str) -> None:
    """Daemons that share a bucket hold no lease of it: their catalog knows them."""
    database = Database.open(url)
    try:
        with database.read() as session:
            names = list(session.scalars(select(NodeRow.name).where(NodeRow.until > func.clock_timestamp())))
    finally:
        database.close()
    if names:
        raise RootBusy(
            f"{label}: daemons run that share the catalog {address(url)}: {', '.join(sorted(names))}",
            hint=f"stop them first; one that was killed is forgotten after {LEASE_S:.0f} s",
        )


def _checked(place: config.RootPlace, store: Store, url: str, thorough: bool) -> CatalogCheck:
    root = place.directory
    catalog = recovery.open_sound(url)
    try:
        ownership.check(catalog.database, known(root), root)
        return consistency.check(store, catalog, writers=(), thorough=thorough)
    finally:
        catalog.close()
