"""Checks and rebuilds a catalog whose root no daemon serves, or hands it over to another root."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from holdfast_formats.errors import StorageFailed
from holdfast_formats.rest.consistency import CatalogAdoption, CatalogCheck
from holdfast_formats.rest.offline import CatalogWork
from holdfast_formats.root_files import check_local
from holdfast_formats.timestamps import utc_now
from holdfast_service import config
from holdfast_service.control.access import audit
from holdfast_service.control.catalog import recovery
from holdfast_service.control.catalog.attempts import make_one
from holdfast_service.control.checkpoints import consistency, ownership
from holdfast_service.control.database.engines import address
from holdfast_service.storage import RootStorage, Store, lock_root, stored_in, tier_at
from holdfast_service.storage.identity import Whereabouts, known, settle


def run(work: CatalogWork) -> dict[str, Any]:
    """The report. `RootBusy` while a daemon serves the root, which then must do it. A root in a bucket can adopt a catalog;
    daemons that share it are not noticed.
    """
    if work.act != "adopt":
        check_local(work.root)
    settings = config.parse(["--root", work.root, *(["--catalog", work.catalog] if work.catalog else [])])
    place = settings.place
    if place.bucket is None and not place.directory.is_dir():
        raise StorageFailed(f"the directory {place.directory} does not exist", hint="pass the daemon's directory as --root")
    with ExitStack() as stack:
        stack.callback(lock_root(place.directory).release)
        return _made(work.act, _storage(settings, stack), settings).model_dump()


def _storage(settings: config.Config, stack: ExitStack) -> RootStorage:
    place = settings.place
    if place.bucket is None:
        return stored_in(tier_at(place.directory))
    from holdfast_service.storage.objects.opening import open_bucket  # which needs the extra s3

    storage = open_bucket(place.bucket, settings.node, place.directory, alone=True)
    stack.callback(storage.close)
    return storage


def _made(act: str, storage: RootStorage, settings: config.Config) -> BaseModel:
    place, url, store = settings.place, settings.catalog_url, storage.store
    root = place.directory
    shared = address(url) if config.is_shared(url) else None
    if act not in ("rebuild", "adopt"):
        return _checked(root, store, url, thorough=act == "check-thorough")
    where = Whereabouts(root, place.label if place.bucket else "")
    root_id = settle(storage.records, where, shared, leave=act == "adopt").mark.id
    who = ownership.Root(root_id, place.label, root, settings.node)
    opened = recovery.open_catalog(url)
    try:
        if act == "adopt":
            before = ownership.adopt(opened.catalog, who, utc_now())
            if shared is None:
                make_one(storage.records)
            audit.offline(opened.catalog.database, settings.node, "catalog-adopted", target=place.label)
            return CatalogAdoption(catalog=opened.catalog.database.url, root=place.label, before=before)
        ownership.claim(store, opened.catalog, who, utc_now())
        result = consistency.rebuild(store, opened.catalog, writers=(), now=utc_now())
        audit.offline(opened.catalog.database, settings.node, "catalog-rebuilt")
    finally:
        opened.catalog.close()
    aside = None if opened.set_aside is None else str(opened.set_aside)
    return result.model_copy(update={"set_aside": aside, "salvaged": opened.salvaged})


def _checked(root: Path, store: Store, url: str, thorough: bool) -> CatalogCheck:
    catalog = recovery.open_sound(url)
    try:
        ownership.check(catalog.database, known(root), root)
        return consistency.check(store, catalog, writers=(), thorough=thorough)
    finally:
        catalog.close()
