"""Scripts, styles and the vendored libraries: read once, named by their content, cached by the browser for good."""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from importlib.resources import files
from typing import NamedTuple

from fastapi import APIRouter
from starlette.responses import Response

from holdfast_formats.errors import NoSuchResource

router = APIRouter(include_in_schema=False)

_TYPES = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8", "svg": "image/svg+xml"}
_NUMBERED = re.compile(r"icon-(error|warning)-([1-9][0-9]?)\.svg")
SERVED = (
    "base.css",
    "parts.css",
    "theme.js",
    "page.js",
    "charts.js",
    "heat.js",
    "events.js",
    "live.js",
    "overlay.js",
    "overview.css",
    "find.js",
    "reference.js",
    "run.css",
    "icon.svg",
    "vendor/htmx-4.0.1.min.js",
    "vendor/swagger-ui-5.32.6-bundle.js",
    "vendor/swagger-ui-5.32.6.css",
    "vendor/uPlot-1.6.32.iife.min.js",
    "vendor/uPlot-1.6.32.min.css",
)


class Asset(NamedTuple):
    data: bytes
    media_type: str
    tag: str


@lru_cache
def asset(name: str) -> Asset:
    """One of the served files; `NoSuchResource` for any other name."""
    data = _numbered_icon(name) or _read(name)
    return Asset(data, _TYPES[name.rpartition(".")[2]], hashlib.sha256(data).hexdigest()[:16])


def _read(name: str) -> bytes:
    if name not in SERVED:
        raise NoSuchResource(f"/static/{name} does not exist")
    return files(__package__).joinpath("static", *name.split("/")).read_bytes()


def _numbered_icon(name: str) -> bytes | None:
    """The icon with a number of alerts on it, in the colour of their level; None for another name."""
    wanted = _NUMBERED.fullmatch(name)
    if wanted is None:
        return None
    colour, size = ("#d1242f" if wanted[1] == "error" else "#9a6700"), (14 if len(wanted[2]) == 1 else 11)
    number = (
        f'<circle cx="22" cy="10" r="10" fill="{colour}"/><text x="22" y="15" font-family="sans-serif" font-weight="bold" '
        f'font-size="{size}" fill="#fff" text-anchor="middle">{wanted[2]}</text></svg>'
    )
    return _read("icon.svg").replace(b"</svg>", number.encode())


def address(name: str) -> str:
    """The address of a file. It changes with the content, so a browser may cache it for good."""
    return f"/static/{name}?{asset(name).tag}"


@router.get("/static/{name:path}")
def get_static(name: str) -> Response:
    found = asset(name)
    headers = {"Cache-Control": "public, max-age=31536000, immutable", "X-Content-Type-Options": "nosniff"}
    return Response(found.data, media_type=found.media_type, headers=headers | {"ETag": f'"{found.tag}"'})
