"""Groups of runs, by tag, over the REST API. One function per route."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

from holdfast.rest.api import Api
from holdfast_formats.rest.groups import GroupDetails, RunGroup

PAGE_ITEMS = 20


def groups(api: Api, metric: str = "", highest: bool = False) -> Iterator[RunGroup]:
    """All groups, by tag. `metric`: of their best and last values; `highest`: the highest is the best."""
    return api.pages("/v1/groups", RunGroup, {**_asked(metric, highest), "limit": str(PAGE_ITEMS)})


def group(api: Api, tag: str, metric: str = "", highest: bool = False) -> GroupDetails:
    """One group with its runs, the best first; `NoSuchResource`."""
    path = f"/v1/groups/{quote(tag, safe='')}"
    return api.parsed(api.request("GET", path, params=_asked(metric, highest)).content, GroupDetails)


def _asked(metric: str, highest: bool) -> dict[str, str]:
    return ({"metric": metric} if metric else {}) | {"mode": "max" if highest else "min"}
