"""Bodies of the search for runs and checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from holdfast_formats.body import Body


class SearchHit(Body):
    """A run or a checkpoint that was found."""

    kind: Literal["run", "checkpoint"]
    run: str
    step: int | None = Field(default=None, description="of a checkpoint")
    label: str | None = Field(default=None, description="the label by which it was found, if it was found by one")


class SearchResult(Body):
    """What was found, the best first."""

    items: list[SearchHit]
    more: bool = Field(description="whether there are more than `limit` hits")
