"""Bodies of the REST API about saved views: named choices of runs on the overview, which a team shares."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field

from holdfast_formats.body import Body
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.tags import TAG_PATTERN

NAME_CHARACTERS_MAX = 64
NAME_CHARACTERS = f"1 to {NAME_CHARACTERS_MAX} printable characters without /, and no space at either end"


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("has characters that cannot be printed")
    return text


class ViewQuery(Body):
    """What the overview shows, as the parameters of its address."""

    q: Annotated[str, AfterValidator(_printable)] = Field(
        default="", max_length=128, description="words that a run's name contains"
    )
    sort: Annotated[str, AfterValidator(_printable)] = Field(
        default="training", max_length=256, description="order, as of `GET /v1/summaries`"
    )
    metric: Annotated[str, AfterValidator(_printable)] = Field(
        default="", max_length=128, description="metric with a column of its own"
    )
    tag: str = Field(default="", pattern=f"^({TAG_PATTERN})?$", description="only runs with this tag")
    group: Literal["", "tag"] = Field(default="", description="`tag`: groups of runs instead of runs")


class ViewRequest(ViewQuery):
    model_config = ConfigDict(extra="forbid")


class View(ViewQuery):
    """A saved view."""

    name: str


def check_view_name(name: str) -> str:
    """Return the name, or raise `InvalidRequest`."""
    fits = 1 <= len(name) <= NAME_CHARACTERS_MAX and name.isprintable()
    if not fits or "/" in name or name != name.strip() or name in (".", ".."):
        raise InvalidRequest(f"a view cannot have the name {name[:80]!r}", hint=f"use {NAME_CHARACTERS}")
    return name
