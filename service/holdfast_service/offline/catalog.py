"""`python -m holdfast_service.offline catalog check|rebuild|adopt --root DIR`: a catalog whose root no daemon serves.

`holdfast catalog` runs it and prints its output: one JSON document, which is a problem after an error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from holdfast_formats.errors import CheckpointError, InvalidRequest, StorageFailed, exit_status
from holdfast_formats.moments import utc_now
from holdfast_formats.rest.consistency import CatalogAdoption
from holdfast_service import config
from holdfast_service.control.access import audit
from holdfast_service.control.catalog import salvage
from holdfast_service.control.catalog.shared_attempts import make_one
from holdfast_service.control.checkpoints import consistency, ownership
from holdfast_service.control.database.engines import address
from holdfast_service.storage import PosixStore, PosixTier, lock_root
from holdfast_service.storage.identity import known, settle

WORK = ("check", "check-thorough", "rebuild", "adopt")


def main(arguments: list[str] | None = None) -> int:
    """Run it and print the result; the exit status follows the error's branch."""
    try:
        work, *flags = sys.argv[1:] if arguments is None else arguments
        if work not in WORK:
            raise InvalidRequest(f"{work!r} is none of {', '.join(WORK)}")
        print(run(work, config.parse(flags)))
    except CheckpointError as error:
        print(json.dumps(error.problem()))
        return exit_status(error)
    return 0


def run(work: str, settings: config.Config) -> str:
    """The report as JSON. `RootBusy` while a daemon serves the root, which then must do it."""
    root = settings.root.resolve()
    if not root.is_dir():
        raise StorageFailed(f"the directory {root} does not exist", hint="pass the daemon's directory as --root")
    lock = lock_root(root)
    try:
        return _made(work, root, settings)
    finally:
        lock.release()


def _made(work: str, root: Path, settings: config.Config) -> str:
    tier, url = PosixTier(root), settings.catalog_url
    shared = address(url) if config.is_shared(url) else None
    if work not in ("rebuild", "adopt"):
        return _checked(tier, url, thorough=work == "check-thorough")
    who = ownership.Root(settle(tier, shared, leave=work == "adopt").mark.id, root, settings.node)
    opened = salvage.open_catalog(url)
    try:
        if work == "adopt":
            before = ownership.adopt(opened.catalog, who, utc_now())
            if shared is None:
                make_one(tier)
            audit.offline(opened.catalog.database, settings.node, "catalog-adopted", target=str(root))
            return CatalogAdoption(catalog=opened.catalog.database.url, root=str(root), before=before).model_dump_json()
        ownership.claim(PosixStore(tier), opened.catalog, who, utc_now())
        made = consistency.rebuild(PosixStore(tier), opened.catalog, writers=(), now=utc_now())
        audit.offline(opened.catalog.database, settings.node, "catalog-rebuilt")
    finally:
        opened.catalog.close()
    aside = None if opened.set_aside is None else str(opened.set_aside)
    return made.model_copy(update={"set_aside": aside, "salvaged": opened.salvaged}).model_dump_json()


def _checked(tier: PosixTier, url: str, thorough: bool) -> str:
    catalog = salvage.open_sound(url)
    try:
        ownership.check(catalog.database, known(tier.root), tier.root)
        return consistency.check(PosixStore(tier), catalog, writers=(), thorough=thorough).model_dump_json()
    finally:
        catalog.close()
