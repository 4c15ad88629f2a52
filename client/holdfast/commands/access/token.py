"""`holdfast token`: create, rotate, list and revoke API tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from pydantic import ValidationError

from holdfast.commands.retention import parse_bytes
from holdfast.config import default_url
from holdfast.rest.api import Api
from holdfast.rest.tokens import RootTokens, ServiceTokens, TokenStore
from holdfast.terminal import console
from holdfast.terminal.options import AsJson, NamedRoot, Url, one_place
from holdfast_formats.body import first_mistake
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest import lists
from holdfast_formats.rest.operations import GRACE_MAX_S, NewToken, RotationRequest, TokenRequest

app = typer.Typer(help="Create, rotate, list and revoke tokens.", no_args_is_help=True)
Root = Annotated[
    NamedRoot | None,
    typer.Option(
        "--root",
        metavar="ROOT",
        help="Use the catalog of this directory, or this machine's of s3://BUCKET/PREFIX; no service needs to run.",
        parser=NamedRoot.parse,
    ),
]
Catalog = Annotated[
    str | None, typer.Option("--catalog", metavar="URL", help="With --root: URL of its catalog, if it is elsewhere.")
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the token: letters, digits and . _ -")]
Scope = Annotated[str, typer.Option("--scope", metavar="read|write|admin", help="What the token allows.")]
Runs = Annotated[
    str, typer.Option("--runs", metavar="PATTERN", help="Which runs: a name, a prefix ending in *, or * for all.")
]
Expires = Annotated[
    str | None, typer.Option("--expires", metavar="30d", help="Time until it expires: 900s, 15min, 12h, 30d.")
]
Grace = Annotated[str, typer.Option("--grace", metavar="1d", help="How long the old secret is still accepted: 0s to 30d.")]
Requests = Annotated[
    int | None, typer.Option("--requests-per-s", metavar="N", help="Requests per second; more get 429.", min=1)
]
Bulk = Annotated[
    str | None, typer.Option("--bytes-per-s", metavar="BYTES", help="Bytes of responses per second, such as 100MB.")
]
_SPAN = re.compile(r"([1-9]\d{0,9})(s|min|h|d)")
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86_400}


@app.command()
def create(  # noqa: PLR0913 - options of a command
    name: Name,
    scope: Scope = "read",
    runs: Runs = "*",
    expires: Expires = None,
    requests_per_s: Requests = None,
    bytes_per_s: Bulk = None,
    root: Root = None,
    catalog: Catalog = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Create a token. It is printed once and not stored in readable form."""
    with console.reporting(as_json), _store(root, catalog, url) as store:
        try:
            wanted = TokenRequest(
                name=name,
                scope=scope,
                runs=runs,
                expires_s=_seconds(expires),
                requests_per_s=requests_per_s,
                bytes_per_s=parse_bytes(bytes_per_s),
            )
        except ValidationError as error:
            raise InvalidRequest(first_mistake(error), hint="see `holdfast token create --help`") from error
        token = store.create(wanted)
    if expires is None:
        console.warn(
            f"the token {name} never expires; --expires 90d limits its lifetime, `holdfast token revoke {name}` ends it"
        )
    _show(token, as_json)


@app.command()
def rotate(  # noqa: PLR0913 - options of a command
    name: Name,
    grace: Grace = "1d",
    expires: Expires = None,
    root: Root = None,
    catalog: Catalog = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Give a token a new secret. The old one is accepted for a while, so that no client is cut off."""
    with console.reporting(as_json), _store(root, catalog, url) as store:
        grace_s = 0 if grace in ("0", "0s") else _seconds(grace, "--grace") or 0
        if grace_s > GRACE_MAX_S:
            raise InvalidRequest(f"--grace {grace} is over 30d", hint="give 30d or less")
        token = store.rotate(name, RotationRequest(grace_s=grace_s, expires_s=_seconds(expires)))
    _show(token, as_json)


def _show(new_token: NewToken, as_json: bool) -> None:
    """The token goes to stdout, alone; its description to stderr."""
    if as_json:
        console.print_json(new_token)
        return
    until = f" until {new_token.expires}" if new_token.expires else ""
    text = f"token {new_token.name}: scope {new_token.scope}, runs {new_token.runs}{until}; it cannot be shown again:"
    console.err().print(text, markup=False)
    console.out().print(new_token.token, markup=False)


@app.command()
def ls(root: Root = None, catalog: Catalog = None, url: Url = None, as_json: AsJson = False) -> None:
    """List tokens, newest first."""
    with console.reporting(as_json), _store(root, catalog, url) as store:
        tokens = store.all()
    console.listed(lists.TOKENS, tokens, "No tokens.", as_json)


@app.command()
def revoke(name: Name, root: Root = None, catalog: Catalog = None, url: Url = None, as_json: AsJson = False) -> None:
    """Revoke a token, immediately and permanently."""
    with console.reporting(as_json), _store(root, catalog, url) as store:
        store.revoke(name)
    console.answer({"name": name, "revoked": True}, f"revoked {name}", as_json)


@contextmanager
def _store(root: NamedRoot | None, catalog: str | None, url: str | None) -> Iterator[TokenStore]:
    one_place(root, url)
    if root is not None:
        yield RootTokens(root.label, catalog)
        return
    if catalog is not None:
        raise InvalidRequest("--catalog needs --root", hint="pass --root as well")
    with Api(url or default_url()) as api:
        yield ServiceTokens(api)


def _seconds(span: str | None, option: str = "--expires") -> int | None:
    match = _SPAN.fullmatch(span) if span is not None else None
    if span is not None and match is None:
        raise InvalidRequest(f"{option} {span!r} is not a time span", hint="write 900s, 15min, 12h or 30d")
    return int(match[1]) * _SECONDS[match[2]] if match else None
