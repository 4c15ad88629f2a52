"""`holdfast token`: who may come in at a service's door."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from holdfast.config import default_url
from holdfast.rest.api import Api
from holdfast.rest.tokens import RootTokens, ServiceTokens, TokenStore
from holdfast.terminal import console
from holdfast.terminal.options import AsJson, Url
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest.operations import Token, TokenRequest

app = typer.Typer(help="Make, list and revoke the tokens that a service's door asks for.", no_args_is_help=True)
Root = Annotated[
    Path | None, typer.Option("--root", metavar="DIR", help="In this directory's catalog; no service need run.")
]
Catalog = Annotated[
    str | None, typer.Option("--catalog", metavar="URL", help="With --root: where its catalog is, if not there.")
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Whose it is: letters, digits and . _ -")]
Scope = Annotated[str, typer.Option("--scope", metavar="read|write|admin", help="What it may do.")]
Runs = Annotated[str, typer.Option("--runs", metavar="PATTERN", help="To which runs: a name, a prefix ending in *, or *.")]
Expires = Annotated[str | None, typer.Option("--expires", metavar="30d", help="When it ends: 900s, 15min, 12h, 30d.")]
_SPAN = re.compile(r"([1-9]\d{0,9})(s|min|h|d)")
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86_400}


@app.command()
def create(  # noqa: PLR0913 - options of a command
    name: Name,
    scope: Scope = "read",
    runs: Runs = "*",
    expires: Expires = None,
    root: Root = None,
    catalog: Catalog = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Make a token. Its text is printed once, and kept nowhere."""
    with console.reporting(as_json), _store(root, catalog, url) as store:
        try:
            wanted = TokenRequest(name=name, scope=scope, runs=runs, expires_s=_seconds(expires))
        except ValidationError as error:
            first = error.errors()[0]
            raise InvalidRequest(f"{first['loc'][0]}: {first['msg']}", hint="see `holdfast token create --help`") from error
        made = store.create(wanted)
    if as_json:
        console.print_json(made.model_dump())
    else:
        until = f" until {made.expires}" if made.expires else ""
        told = f"{made.name} may {made.scope} the runs {made.runs}{until}; this cannot be shown again:"
        console.err().print(told, markup=False)
        console.out().print(made.token, markup=False)


@app.command()
def ls(root: Root = None, catalog: Catalog = None, url: Url = None, as_json: AsJson = False) -> None:
    """List tokens, newest first."""
    with console.reporting(as_json), _store(root, catalog, url) as store:
        found = store.all()
    if as_json:
        console.print_json([token.model_dump() for token in found])
        return
    table = console.table("NAME", "SCOPE", "RUNS", "CREATED", "USED", "STATE")
    for token in found:
        used = console.human_age(token.used) if token.used else "never"
        table.add_row(token.name, token.scope, token.runs, console.human_age(token.created), used, _state(token))
    console.out().print(table if found else "No tokens.", markup=False)


@app.command()
def revoke(name: Name, root: Root = None, catalog: Catalog = None, url: Url = None, as_json: AsJson = False) -> None:
    """Take a token out of force, at once and for good."""
    with console.reporting(as_json), _store(root, catalog, url) as store:
        store.revoke(name)
    if as_json:
        console.print_json({"name": name, "revoked": True})
    else:
        console.out().print(f"revoked {name}", markup=False)


@contextmanager
def _store(root: Path | None, catalog: str | None, url: str | None) -> Iterator[TokenStore]:
    if root is not None and url is not None:
        raise InvalidRequest("--root and --url exclude each other", hint="give the one you mean")
    if root is not None:
        yield RootTokens(root, catalog)
        return
    if catalog is not None:
        raise InvalidRequest("--catalog says where a root's catalog is", hint="give --root as well")
    with Api(url or default_url()) as api:
        yield ServiceTokens(api)


def _seconds(span: str | None) -> int | None:
    found = _SPAN.fullmatch(span) if span is not None else None
    if span is not None and found is None:
        raise InvalidRequest(f"--expires {span!r} is no span of time", hint="write 900s, 15min, 12h or 30d")
    return int(found[1]) * _SECONDS[found[2]] if found else None


def _state(token: Token) -> str:
    if token.revoked is not None:
        return "revoked"
    return "in force" if token.expires is None else f"until {token.expires}"
