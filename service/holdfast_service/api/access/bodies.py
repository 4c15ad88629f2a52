"""The kind of a body, decided once by its Content-Type for all its readers. Few are known, each in one spelling.

Small bodies are read whole before they are parsed, and JSON must have one meaning: no repeated member, no NaN, no number
beyond 64 bits, no text that is not Unicode, no nesting that exhausts a parser's stack.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, NoReturn

from starlette.types import Message, Receive, Scope

from holdfast_formats.errors import DeadlineExceeded, InvalidRequest, LimitExceeded

BODY_BYTES_MAX = 2**20
BODY_WAIT_MAX_S = 30.0
DEPTH_MAX = 32
MEMBERS_MAX = 50_000  # what reads a body lists every mistake in it: a kilobyte for each member
INTEGER_MAX = 2**63 - 1
Kind = Literal["json", "form", "octets"]
JSON: Kind = "json"
FORM: Kind = "form"
OCTETS: Kind = "octets"
MEDIA_TYPES: dict[str, Kind] = {
    "application/json": JSON,
    "application/x-www-form-urlencoded": FORM,
    "application/octet-stream": OCTETS,
}
_MEDIA_TYPE = re.compile(r'([a-z0-9/.+-]+)(?:[ \t]*;[ \t]*charset=(?:utf-8|"utf-8"))?', re.IGNORECASE)
_STRUCTURE = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{]|[\]},]', re.DOTALL)


class Gone(Exception):
    """The client hung up in the middle of its body."""


def kind_of(content_type: str | None) -> Kind | None:
    """The kind of body that a Content-Type names; None without one; `InvalidRequest`, 415, for an unknown one."""
    if content_type is None:
        return None
    spelled = _MEDIA_TYPE.fullmatch(content_type)
    kind = MEDIA_TYPES.get(spelled[1].lower()) if spelled else None
    if kind is None:
        raise unknown(f"no route reads a body of type {content_type[:80]!r}", _named())
    return kind


def check_kind(given: Kind | None, read: Kind) -> None:
    """`InvalidRequest`, 415, unless a present body is of the kind that is read; octets need no name."""
    if given != read and not (given is None and read == OCTETS):
        what = "without Content-Type" if given is None else f"of the type {media_type(given)}"
        raise unknown(f"this route does not read a body {what}", f"send it as Content-Type: {media_type(read)}")


def unknown(detail: str, hint: str) -> InvalidRequest:
    """The error for a body of an unsupported kind, or without a name: 415."""
    return InvalidRequest(detail, hint=hint, status=415)


def media_type(kind: Kind) -> str:
    return next(name for name, known in MEDIA_TYPES.items() if known == kind)


def _named() -> str:
    return f"use one of {', '.join(MEDIA_TYPES)}, with no parameter except charset=utf-8"


class CheckedBody(NamedTuple):
    """A body that was read and checked, to be replayed, and its JSON."""

    receive: Receive
    document: Any = None


async def checked(scope: Scope, headers: Mapping[str, str], receive: Receive, read_as: Kind) -> CheckedBody:
    """The body, checked as the kind that the route reads; later readers see only that kind."""
    given = kind_of(headers.get("content-type"))
    if given is not None:
        check_kind(given, read_as)
    if read_as == OCTETS:
        _tell(scope, read_as)
        return CheckedBody(receive)
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise unknown("this route does not accept an encoded body", "leave Content-Encoding out")
    body = await read(scope, receive)
    if body:
        check_kind(given, read_as)
    _tell(scope, read_as if body else None)
    return CheckedBody(replay(body, receive), parse(body) if body and read_as == JSON else None)


def _tell(scope: Scope, kind: Kind | None) -> None:
    """Set the one Content-Type by which the framework reads the body, and its kind for the route."""
    others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
    scope["headers"] = others if kind is None else [*others, (b"content-type", media_type(kind).encode())]
    scope.setdefault("state", {})["body"] = kind


async def read(scope: Scope, receive: Receive) -> bytes:
    """The whole body; `LimitExceeded`, or `DeadlineExceeded` for one that trickles, or `Gone`."""
    stated = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    if stated.isdigit() and (len(stated) > 18 or int(stated) > BODY_BYTES_MAX):
        raise _too_long()
    try:
        return await asyncio.wait_for(_read(receive), BODY_WAIT_MAX_S)
    except asyncio.TimeoutError:
        raise DeadlineExceeded(f"the body did not arrive within {BODY_WAIT_MAX_S:.0f} s", hint="send it faster") from None


async def _read(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        body += message.get("body", b"")
        if len(body) > BODY_BYTES_MAX:
            raise _too_long()
        if not message.get("more_body", False):
            return bytes(body)


def replay(body: bytes, receive: Receive) -> Receive:
    """Replay the body for the application, and then the connection's own messages."""
    held: deque[Message] = deque([{"type": "http.request", "body": body, "more_body": False}])

    async def again() -> Message:
        return held.popleft() if held else await receive()

    return again


def parse(body: bytes) -> Any:
    """The JSON document; `InvalidRequest` or `LimitExceeded` for an ambiguous or invalid one."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: {error}") from error
    _check_structure(text)
    try:
        value = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number, parse_int=_integer, parse_float=_real)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("the body has an unpaired surrogate in a string") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}", hint="/openapi.json describes every body") from error
    return value


def _check_structure(text: str) -> None:
    depth = members = 0
    for token in _STRUCTURE.finditer(text):
        if token[0] in "[{":
            depth += 1
            if depth > DEPTH_MAX:
                raise LimitExceeded(f"the body is nested deeper than {DEPTH_MAX}")
        elif token[0] in "]}":
            depth -= 1
        elif token[0] == ",":
            members += 1
            if members > MEMBERS_MAX:
                raise LimitExceeded(f"the body has more than {MEMBERS_MAX} members")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the member {twice[:80]!r} appears twice")
    return unique


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _integer(digits: str) -> int:
    if len(digits) > 20 or abs(number := int(digits)) > INTEGER_MAX:
        raise ValueError(f"the number {digits[:24]}… is beyond 64 bits")
    return number


def _real(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"the number {digits[:24]} is too large")
    return number


def _too_long() -> LimitExceeded:
    return LimitExceeded(
        f"the body is over the limit of {BODY_BYTES_MAX} bytes", hint="only chunks of uploads may be larger"
    )
