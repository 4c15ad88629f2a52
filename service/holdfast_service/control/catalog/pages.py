"""Pages of lists: how long they are, and the cursors between them. A cursor names the last item, so inserts move nothing."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Any, TypeVar

from holdfast_formats.errors import InvalidRequest, LimitExceeded
from holdfast_formats.rest import bodies

PAGE_ITEMS_MAX = 1000
INTEGER_MAX = 2**63 - 1
_Item = TypeVar("_Item")


def bounded(limit: int) -> int:
    """The limit, or `InvalidRequest`, or `LimitExceeded`."""
    if limit < 1:
        raise InvalidRequest(f"a page has at least 1 item, not {limit}")
    if limit > PAGE_ITEMS_MAX:
        raise LimitExceeded(f"a page has at most {PAGE_ITEMS_MAX} items, not {limit}")
    return limit


def page(kind: str, found: list[_Item], limit: int, key: Callable[[_Item], Any]) -> bodies.Page[_Item]:
    """A page from one item more than it holds. `kind` names the list's order, so that cursors of other lists are refused."""
    items = found[:limit]
    behind = f"{kind}:{key(items[-1])}".encode() if len(found) > limit else None
    return bodies.Page(items=items, next=None if behind is None else base64.urlsafe_b64encode(behind).decode())


def decode_cursor(kind: str, cursor: str | None) -> str | None:
    """The key of the item after which the next page begins; `InvalidRequest` for a cursor that is not of this `kind` of
    list.
    """
    if cursor is None:
        return None
    try:
        named, _, key = base64.b64decode(cursor, altchars=b"-_", validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        named, key = "", ""
    if named != kind or not key:
        raise bad_cursor()
    return key


def integer(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 19 and int(key) <= INTEGER_MAX):
        raise bad_cursor()
    return int(key)


def bad_cursor() -> InvalidRequest:
    return InvalidRequest("the cursor does not belong to this list", hint="pass `next` of the previous page unchanged")
