"""Creates, rotates, lists and revokes tokens of a root, served or not.

The first admin's token must come from a user with write access to the root.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast_files.objects.address import is_address
from holdfast_formats import naming
from holdfast_formats.errors import NoSuchResource, WrongRoot
from holdfast_formats.rest.offline import TokenWork
from holdfast_formats.rest.operations import Token
from holdfast_formats.root_files import check_root_place
from holdfast_formats.timestamps import utc_now
from holdfast_service import config
from holdfast_service.config import default_node
from holdfast_service.control.access import audit
from holdfast_service.control.access.tokens import Tokens
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.catalog.pages import PAGE_ITEMS_MAX
from holdfast_service.control.checkpoints import ownership
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.engines import address
from holdfast_service.storage import tier_at
from holdfast_service.storage.identity import Whereabouts, catalog_of, known
from holdfast_service.storage.posix import make_root


def run(work: TokenWork) -> dict[str, Any]:
    """The result."""
    root = _directory(work)
    database = Database.open(_catalog_url(root, work))
    try:
        ownership.check(database, known(root), root)
        tokens = Tokens(database, Events(database, default_node(), utc_now), utc_now)
        if work.act == "token-create":
            assert work.create is not None
            made = tokens.create(work.create).model_dump()
            audit.offline(database, default_node(), "token-created", target=work.create.name)
            return made
        if work.act == "token-rotate":
            new = tokens.rotate(work.name, work.rotate).model_dump()
            audit.offline(database, default_node(), "token-rotated", target=work.name)
            return new
        if work.act == "token-revoke":
            tokens.revoke(work.name)
            audit.offline(database, default_node(), "token-revoked", target=work.name)
            return {"name": work.name, "revoked": True}
        return {"items": [token.model_dump() for token in _all(tokens)]}
    finally:
        database.close()


def _directory(work: TokenWork) -> Path:
    """The root's directory, or for a bucket the one in which this machine's daemon keeps its catalog."""
    if is_address(work.root):
        place = config.parse(["--root", work.root]).place
        if not (place.directory / naming.ROOT_FILE).is_file():
            raise NoSuchResource(
                f"no daemon of this machine has served {place.label}: its catalog would be in {place.directory}",
                hint="start the daemon first; if it has another --state DIR, set HOLDFAST_STATE to that directory",
            )
        return place.directory
    root = Path(work.root)
    if not root.is_dir() and work.act != "token-create":
        raise NoSuchResource(f"the directory {root} does not exist", hint="pass the daemon's directory as --root")
    check_root_place(root)
    make_root(root)
    return root


def _catalog_url(root: Path, work: TokenWork) -> str:
    """The URL of the catalog: the given one, or the one that a daemon of this root would use. `WrongRoot` if the root was
    last served with another catalog: a daemon does not know tokens of that.
    """
    url = config.parse(["--root", work.root, *(["--catalog", work.catalog] if work.catalog else [])]).catalog_url
    shared = catalog_of(tier_at(root), Whereabouts(root))
    if shared is not None and not (config.is_shared(url) and address(url) == shared):
        hint = "pass its URL with --catalog, or set HOLDFAST_CATALOG"
        raise WrongRoot(f"the tokens of {root} are in the catalog {shared}", hint=hint)
    return url


def _all(tokens: Tokens) -> list[Token]:
    found: list[Token] = []
    cursor = None
    while True:
        page = tokens.page(cursor, PAGE_ITEMS_MAX)
        found += page.items
        if (cursor := page.next) is None:
            return found
