"""The head of a request, read once for all checks: limited in length, and without repeated significant headers.

Two readers that pick different ones of two equal headers would check one request and perform another.
"""

from __future__ import annotations

import re
from collections import Counter

from starlette.types import Scope

from holdfast_formats.errors import InvalidRequest, LimitExceeded

HEAD_BYTES_MAX = 2**16  # request line and headers
COOKIE = "holdfast_token"
IDENTITY = ("User", "Email", "Groups", "Preferred-Username")  # behind X-Forwarded- or X-Auth-Request-, of a login proxy
_ONCE = frozenset(
    {
        *(f"{family}-{name}".lower() for family in ("X-Forwarded", "X-Auth-Request") for name in IDENTITY),
        "authorization",
        "content-encoding",
        "content-length",
        "content-range",
        "content-type",
        "cookie",
        "host",
        "if-match",
        "if-none-match",
        "if-range",
        "last-event-id",
        "origin",
        "range",
        "sec-fetch-site",
        "transfer-encoding",
        "x-content-digest",
    }
)
_OURS = "x-holdfast-"
_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{0,5}))?", re.ASCII)
_SPACE = " \t"  # what HTTP allows around a value: the last byte of UTF-8 may be what Python takes for space, too


def read(scope: Scope) -> dict[str, str]:
    """The headers by lower-case name; `LimitExceeded` for a head that is too long, `InvalidRequest` for an ambiguous one,
    such as a path that ends in a newline: the router ignores that.
    """
    given = [(name.decode("latin-1").lower(), value.decode("latin-1").strip(_SPACE)) for name, value in scope["headers"]]
    size = len(scope.get("raw_path") or scope["path"]) + len(scope["query_string"])
    if size + sum(len(name) + len(value) for name, value in given) > HEAD_BYTES_MAX:
        raise LimitExceeded(f"the request's line and headers are over the limit of {HEAD_BYTES_MAX} bytes")
    if not scope["path"].isprintable():
        raise InvalidRequest(
            "the path has non-printing characters", hint="check the URL: no address of this service has any"
        )
    counts = Counter(name for name, _ in given)
    twice = [name for name, count in counts.items() if count > 1 and (name in _ONCE or name.startswith(_OURS))]
    if twice:
        raise InvalidRequest(f"the header {twice[0]!r} appears twice", hint="send it once")
    headers = dict(given)
    if "host" in headers and not _is_host(headers["host"]):
        raise InvalidRequest(
            f"the Host {headers['host'][:80]!r} is not a valid host", hint="send a name or an address, and a port"
        )
    if "transfer-encoding" in headers and "content-length" in headers:
        raise InvalidRequest("Transfer-Encoding and Content-Length cannot be combined", hint="send only one of them")
    if len(cookies(headers.get("cookie", ""))) > 1:
        raise InvalidRequest(f"the cookie {COOKIE!r} appears twice", hint="sign out, and sign in again")
    return headers


def _is_host(text: str) -> bool:
    """Whether this is a host and nothing else: a user, a path or an invalid port would end up in URLs of this service."""
    match = _HOST.fullmatch(text)
    return match is not None and int(match[1] or 0) < 2**16


def bearer(text: str) -> str | None:
    """The token of an Authorization header, which may be empty; None for another scheme."""
    scheme, _, token = text.strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def cookies(text: str) -> list[str]:
    """All tokens in a Cookie header, in order."""
    pairs = (part.strip().partition("=") for part in text.split(";"))
    return [value for name, _, value in pairs if name.strip() == COOKIE]
