"""`holdfast serve` and `holdfast open`: run the daemon in this process, and open its dashboard in a browser."""

from __future__ import annotations

import html
import importlib.util
import os
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from holdfast import config
from holdfast.rest.api import Api
from holdfast.terminal import console
from holdfast.terminal.options import Url
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.installing import install
from holdfast_formats.rest.operations import Link

# Import names of the extra `service`; listed here because the client must not import the service.
_EXTRAS = ("aiofiles", "alembic", "fastapi", "prometheus_client", "sqlalchemy", "uvicorn", "zstandard")

PagePart = Annotated[
    bool, typer.Option("--print", help="Print the link instead of opening it. The link works once, within a minute.")
]
_PAGE = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0;url={address}"><title>Holdfast</title>'


def serve(context: typer.Context) -> None:
    """Run this machine's checkpoint daemon until it is interrupted. `holdfast serve --help` lists its flags.

    Every flag can also be set in the environment: HOLDFAST_ROOT, HOLDFAST_LISTEN, and so on.
    """
    with console.reporting(as_json=False):
        check_installed()
    os.execv(sys.executable, [sys.executable, "-m", "holdfast_service", *context.args])


def check_installed() -> None:
    """Raise `InvalidRequest` if the service's dependencies are not installed."""
    missing = [name for name in ("holdfast_service", *_EXTRAS) if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidRequest(f"the daemon needs {', '.join(missing)}", hint=install("service"))


def open(url: Url = None, shown: PagePart = False) -> None:
    """Open the dashboard in a browser, signed in. Without a display, print the link."""
    with console.reporting(as_json=False), Api(url or config.default_url()) as api:
        link = api.parsed(api.request("POST", "/v1/links").content, Link)
        address = f"{api.url}{link.path}"
    if shown or not config.has_display() or not _opened(address):
        console.out().print(address, markup=False, soft_wrap=True)
    else:
        console.out().print(f"opened {api.url}", markup=False)


def _opened(address: str) -> bool:
    """Whether a browser was started. It gets a file that redirects, because every user can read its command line."""
    page = config.runtime_directory() / "open.html"
    try:
        page.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        page.unlink(missing_ok=True)
        descriptor = os.open(page, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except OSError:
        return False
    with os.fdopen(descriptor, "w") as file:
        file.write(_PAGE.format(address=html.escape(address)))
    return webbrowser.open(Path(page).as_uri())
