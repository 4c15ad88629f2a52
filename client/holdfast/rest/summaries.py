"""Summaries of the checkpointing of runs, over the REST API. One function per route."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from urllib.parse import quote

from holdfast.rest.api import Api
from holdfast_formats.rest.measurements import RunSummary

PAGE_ITEMS = 100


def summary(api: Api, run: str) -> RunSummary:
    """The summary of one run; `NoSuchRun`."""
    return api.get(f"/v1/runs/{quote(run, safe='')}/summary", RunSummary)


def summaries(
    api: Api, prefix: str = "", order: str = "name", most: int | None = None, *, failed: bool = True
) -> Iterator[RunSummary]:
    """Summaries of all runs whose name begins with `prefix`, at most `most`, read page by page. `order` is one of
    `RUN_SORTS`, with a minus for the largest first, `metric:NAME` or `attention`. `failed`: include runs that failed to
    start.
    """
    query = {"prefix": prefix or None, "sort": order, "limit": str(PAGE_ITEMS if most is None else min(most, PAGE_ITEMS))}
    query["failed"] = None if failed else "false"
    return islice(api.pages("/v1/summaries", RunSummary, query), most)
