"""`python -m holdfast_service.offline tokens`: creates, rotates, lists and revokes tokens of a root, served or not.

`holdfast token … --root DIR` becomes this process: the first admin's token must come from a user with write access to the
root.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from holdfast_formats.errors import CheckpointError, InvalidRequest, NoSuchResource, exit_status
from holdfast_formats.moments import utc_now
from holdfast_formats.rest.operations import RotationRequest, Token, TokenRequest
from holdfast_formats.whereabouts import check_root_place
from holdfast_service.config import ROOT, catalog_url, default_node
from holdfast_service.control.access import audit
from holdfast_service.control.access.tokens import Tokens
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.catalog.pages import PAGE_ITEMS_MAX
from holdfast_service.control.checkpoints import ownership
from holdfast_service.control.database.database import Database
from holdfast_service.storage.identity import known
from holdfast_service.storage.posix import make_root


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it and print the result as JSON; the exit status follows the error's branch."""
    given = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    try:
        print(json.dumps(_done(given), ensure_ascii=False))
    except CheckpointError as error:
        print(json.dumps(error.problem(), ensure_ascii=False))
        return exit_status(error)
    return 0


def _done(given: argparse.Namespace) -> Any:
    root = Path(given.root)
    if not root.is_dir() and given.what != "create":
        raise NoSuchResource(f"the directory {root} does not exist", hint="pass the daemon's directory as --root")
    check_root_place(root)
    make_root(root)
    database = Database.open(given.catalog or catalog_url(root))
    try:
        ownership.check(database, known(root), root)
        tokens = Tokens(database, Events(database, default_node(), utc_now), utc_now)
        if given.what == "create":
            made = tokens.create(_wanted(given)).model_dump()
            audit.offline(database, default_node(), "token-created", target=given.name)
            return made
        if given.what == "rotate":
            new = tokens.rotate(given.name, RotationRequest(grace_s=given.grace_s, expires_s=given.expires_s)).model_dump()
            audit.offline(database, default_node(), "token-rotated", target=given.name)
            return new
        if given.what == "revoke":
            tokens.revoke(given.name)
            audit.offline(database, default_node(), "token-revoked", target=given.name)
            return {"name": given.name, "revoked": True}
        return [token.model_dump() for token in _all(tokens)]
    finally:
        database.close()


def _wanted(given: argparse.Namespace) -> TokenRequest:
    try:
        return TokenRequest(
            name=given.name,
            scope=given.scope,
            runs=given.runs,
            expires_s=given.expires_s,
            requests_per_s=given.requests_per_s,
            bytes_per_s=given.bytes_per_s,
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidRequest(f"{first['loc'][0]}: {first['msg']}", hint="see `holdfast token create --help`") from error


def _all(tokens: Tokens) -> list[Token]:
    found: list[Token] = []
    cursor = None
    while True:
        page = tokens.page(cursor, PAGE_ITEMS_MAX)
        found += page.items
        if (cursor := page.next) is None:
            return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="holdfast token")
    parser.add_argument("--root", default=str(ROOT))
    parser.add_argument("--catalog")
    commands = parser.add_subparsers(dest="what", required=True)
    create = commands.add_parser("create")
    create.add_argument("name")
    create.add_argument("--scope", default="read")
    create.add_argument("--runs", default="*")
    for flag in ("--expires-s", "--requests-per-s", "--bytes-per-s"):
        create.add_argument(flag, type=int)
    rotate = commands.add_parser("rotate")
    rotate.add_argument("name")
    rotate.add_argument("--grace-s", type=int, default=86_400)
    rotate.add_argument("--expires-s", type=int)
    commands.add_parser("revoke").add_argument("name")
    commands.add_parser("ls")
    return parser
