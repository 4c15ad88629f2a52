"""Tags of runs: words by which people find and group them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from holdfast_formats.errors import InvalidRequest, LimitExceeded

TAGS_MAX = 32  # of a run
TAG_CHARACTERS = "1 to 64 of A-Z a-z 0-9 . _ : = + -, beginning with a letter or digit"
TAG_PATTERN = "[A-Za-z0-9][A-Za-z0-9._:=+-]{0,63}"
_TAG = re.compile(TAG_PATTERN)


def check_tag(tag: str) -> str:
    """Return the tag, or raise `InvalidRequest`."""
    if not is_tag(tag):
        raise InvalidRequest(f"tag {tag!r} is not allowed", hint=f"use {TAG_CHARACTERS}")
    return tag


def is_tag(tag: object) -> bool:
    return isinstance(tag, str) and _TAG.fullmatch(tag) is not None


def check_tags(tags: Iterable[str]) -> tuple[str, ...]:
    """A run's tags, each once, sorted; `InvalidRequest` for one that is not allowed, `LimitExceeded` for too
    many.
    """
    checked = tuple(sorted({check_tag(tag) for tag in tags}))
    if len(checked) > TAGS_MAX:
        raise LimitExceeded(f"the run would have {len(checked)} tags", hint=f"a run has at most {TAGS_MAX}: remove some")
    return checked
