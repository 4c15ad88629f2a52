"""What a trainer says while it works: one line of JSON each, behind a mark, as libraries print at will."""

from __future__ import annotations

import json
from typing import Any

MARK = "fault-lab: "
READY, BEGIN, SAVED, DURABLE, FAILED, END = "ready", "begin", "saved", "durable", "failed", "end"


def say(what: str, **more: Any) -> None:
    print(MARK + json.dumps({"what": what, **more}), flush=True)


def heard(line: str) -> dict[str, Any] | None:
    """The event in a line; None where it is somebody else's."""
    if not line.startswith(MARK):
        return None
    found: dict[str, Any] = json.loads(line.removeprefix(MARK))
    return found


def chained(error: BaseException) -> str:
    """An error and what caused it, each by its class and text."""
    parts = []
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        parts.append(f"{type(each).__name__}: {each}")
        each = each.__cause__ or each.__context__
    return " <- ".join(parts)
