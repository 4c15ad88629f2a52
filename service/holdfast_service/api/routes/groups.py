"""Routes: tags of runs, and all runs with a tag as a group."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from holdfast_formats.rest import bodies
from holdfast_formats.rest.groups import GroupDetails, RunGroup
from holdfast_formats.rest.runs import TaggedRuns
from holdfast_formats.tags import check_tag
from holdfast_service.api import problems
from holdfast_service.api.access.authorization import needs
from holdfast_service.api.services import Cursor, Limit, Wired
from holdfast_service.control.catalog import run_settings
from holdfast_service.control.insight.run_groups import Mode

GROUPS_AT_ONCE = 20  # each of many runs

router = APIRouter(prefix="/v1", tags=["runs"], responses=problems.RESPONSES)
Metric = Annotated[str, Query(max_length=128, description="of `best` and `last`; else `loss`, or what most runs have")]
Best = Annotated[Mode, Query(description="whether the lowest or the highest value is the best")]


@router.get("/tags", dependencies=needs("read"), summary="Tags of runs, and how many runs have each; sorted")
def list_tags(
    services: Wired,
    prefix: Annotated[str, Query(max_length=64, description="only tags that start with this")] = "",
    cursor: Cursor = None,
    limit: Limit = 100,
) -> bodies.Page[TaggedRuns]:
    """Of the runs that the caller may see. They are as new as the runs' files."""
    return run_settings.tags(services.control.catalog, prefix, cursor, limit)


@router.get(
    "/groups",
    dependencies=needs("read"),
    summary="Runs grouped by tag: what they are doing, best and last metric, and config keys that differ",
)
def list_groups(
    services: Wired, metric: Metric = "", mode: Best = "min", cursor: Cursor = None, limit: Limit = GROUPS_AT_ONCE
) -> bodies.Page[RunGroup]:
    """Of the runs that the caller may see. At most 20 groups are on a page."""
    return services.groups.page(metric, mode, cursor, min(limit, GROUPS_AT_ONCE))


@router.get("/groups/{tag}", dependencies=needs("read"), summary="One group, with its runs, the best first")
def get_group(services: Wired, tag: str, metric: Metric = "", mode: Best = "min") -> GroupDetails:
    """Its first 200 runs by name."""
    return services.groups.one(check_tag(tag), metric, mode)
