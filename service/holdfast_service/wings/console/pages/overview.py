"""The overview: a summary sentence, what needs attention, and every run on a line."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, NamedTuple
from urllib.parse import quote

from fastapi import Depends, Query, Request
from markupsafe import Markup
from starlette.responses import Response

from holdfast_formats.rest import bodies
from holdfast_formats.rest.alert_order import danger
from holdfast_formats.rest.columns import RUN_SORTS
from holdfast_formats.rest.groups import GroupDetails, RunGroup
from holdfast_formats.rest.measurements import Alert, Overview, RunSummary
from holdfast_formats.rest.operations import EVENTS
from holdfast_formats.rest.runs import TaggedRuns
from holdfast_formats.rest.views import View, ViewQuery, ViewRequest, check_view_name
from holdfast_formats.tags import is_tag
from holdfast_service.wings.console import alert_actions, refreshed_parts, run_status
from holdfast_service.wings.console.rendering import may_of, page, see
from holdfast_service.wings.console.routing import Posted, filled, page_router
from holdfast_service.wings.console.viewer_api import Asked, PagePart, ViewerApi, shown

router = page_router()

RUNS_SHOWN = 50
TRAINING_UNFOLDED = 12  # runs that train, above what needs attention
ALERTS_SHOWN = 200
UNFOLDED = 4  # alerts of a group
BACK = "overview"
# Events after which nothing on a page of runs is different.
KINDS = [kind for kind in EVENTS if kind not in ("request-refused", "token-changed", "commit-command-started")]
# The orders that the form offers, in words; the table's head has all of them.
TRAINING_FIRST = "training"
SORTS = {
    TRAINING_FIRST: "training first",
    "attention": "attention first",
    "name": "by name",
    "state": "by status, died first",
    "age": "newest checkpoint first",
    "-age": "oldest checkpoint first",
    "-exposed": "costliest crash first",
    "-stall": "longest stall first",
    "goodput": "lowest goodput first",
    "-storage": "most storage first",
}
METRIC = "metric:"
BY_TAG = "tag"
TAGS_OFFERED = 200
Text = Annotated[str, Query(max_length=128)]
Sort = Annotated[str, Query(max_length=256)]


class WantedBoard(NamedTuple):
    """The board's search, order, shown metric and tag, and whether groups of runs are shown instead."""

    q: str
    sort: str
    metric: str
    tag: str
    group: str  # "tag", or empty

    @property
    def mode(self) -> str:
        """Which end of a metric is the best."""
        return "max" if self.sort.startswith(f"-{METRIC}") else "min"

    @property
    def sorts(self) -> dict[str, str]:
        if not self.metric:
            return SORTS
        own = METRIC + self.metric
        return {**SORTS, own: f"lowest {self.metric} first", f"-{own}": f"highest {self.metric} first"}


def _wanted(q: Text = "", sort: Sort = TRAINING_FIRST, metric: Text = "", tag: Text = "", group: Text = "") -> WantedBoard:
    """Parsed parameters; an unknown order becomes the usual one, and what no run can have as a tag is none."""
    column = sort.removeprefix("-")
    tag, group = tag if is_tag(tag) else "", group if group == BY_TAG else ""
    if column.startswith(METRIC):
        metric = column.removeprefix(METRIC)
        return WantedBoard(q, sort if metric else TRAINING_FIRST, metric, tag, group)
    return WantedBoard(q, sort if sort in SORTS or column in RUN_SORTS else TRAINING_FIRST, metric, tag, group)


class ChosenRuns(NamedTuple):
    """A page of runs or of all groups, the group of the tag, and the tags and saved views to choose from."""

    runs: bodies.Page[RunSummary]
    groups: bodies.Page[RunGroup]
    group: GroupDetails | None
    tags: bodies.Page[TaggedRuns]
    views: PagePart[bodies.Page[View]]


class OfferedView(NamedTuple):
    """A saved view as a link."""

    name: str
    query: Mapping[str, str]
    is_shown: bool  # the page is this view


class Board(NamedTuple):
    """A table of runs, in the order that was asked for: its first lines, and the others on request."""

    id: str
    title: str
    columns: refreshed_parts.RunColumns
    shown: list[Markup]
    folded: list[Markup]


class AlertGroup(NamedTuple):
    """Alerts of one code."""

    code: str
    title: str
    level: str
    alerts: list[Alert]

    @property
    def hint(self) -> str | None:
        """What to do about all of them, if that is the same but for their names."""
        for hints in ({one.hint for one in self.alerts}, {_without_name(one) for one in self.alerts}):
            if len(hints) == 1:
                return hints.pop()
        return None


def _without_name(alert: Alert) -> str:
    name = re.escape(alert.run or alert.subject or "")
    return re.sub(rf"(?<![\w.-]){name}(?![\w.-])", "NAME", alert.hint) if name else alert.hint


class ShownGroup(NamedTuple):
    """A group with its first alerts, and the others on request."""

    group: AlertGroup
    hint: str | None
    shown: list[Markup]
    folded: list[Markup]


@router.get("/")
async def show_overview(
    request: Request, api: Asked, wanted: Annotated[WantedBoard, Depends(_wanted)], cursor: str | None = None
) -> Response:
    """The runs that train, what needs attention, and the other runs; in another order, or on a later page, one table of runs
    stands first. Runs that failed to start are shown on request.
    """
    chosen, overview, alerts, health, nodes, going_on = await asyncio.gather(
        _chosen(api, wanted, cursor),
        api.get(Overview, "/v1/overview"),
        api.page(Alert, "/v1/alerts", limit=ALERTS_SHOWN),
        api.get(bodies.Health, "/healthz"),
        shown(api.page(bodies.Node, "/v1/nodes")),
        shown(_under_way(api)),
    )
    may = may_of(request)
    return page(
        request,
        "overview.html",
        asked=wanted,
        keep=wanted._asdict(),
        metrics=_metrics(chosen.runs.items, chosen.groups.items, wanted),
        tags=chosen.tags.items,
        views_found=chosen.views,
        views=_offered(chosen.views.value, wanted),
        run_groups=chosen.groups.items,
        run_group=chosen.group,
        boards=_boards(chosen.runs.items, wanted, first=cursor is None),
        next=(chosen.groups if wanted.group else chosen.runs).next,
        first=cursor is None,
        overview=overview,
        strip=run_status.strip(overview),
        groups=[_shown(group, may) for group in grouped(alerts.items)],
        seen=[refreshed_parts.alert(one, BACK, may) for one in alerts.items if one.acknowledged is not None],
        more=alerts.next is not None,
        kinds=" ".join(KINDS),
        alerts_open=overview.errors + overview.warnings,
        health=health,
        nodes=nodes.value.items if nodes.value else [],
        rounds=going_on.value or [],
    )


@router.post("/views")
async def save_view(api: Asked, form: Posted) -> Response:
    """Save what the overview showed, under a name."""
    query = {name: text for name in ViewQuery.model_fields if (text := form.text(name))}
    await api.request("PUT", _at(form.text("name")), body=filled(ViewRequest, query))
    return see("/", "view-saved", **query)


@router.post("/views/{name}/remove")
async def remove_view(api: Asked, name: str, _: Posted) -> Response:
    await api.request("DELETE", _at(name))
    return see("/", "view-removed")


def _at(view: str) -> str:
    return f"/v1/views/{quote(check_view_name(view), safe='')}"


async def _chosen(api: ViewerApi, wanted: WantedBoard, cursor: str | None) -> ChosenRuns:
    return ChosenRuns(
        *await asyncio.gather(
            _runs(api, wanted, cursor),
            _groups(api, wanted, cursor),
            _group(api, wanted),
            api.page(TaggedRuns, "/v1/tags", limit=TAGS_OFFERED),
            shown(api.page(View, "/v1/views")),
        )
    )


def _offered(views: bodies.Page[View] | None, wanted: WantedBoard) -> list[OfferedView]:
    queries = [(one.name, one.model_dump(exclude={"name"})) for one in (views.items if views else [])]
    return [OfferedView(name, query, _wanted(**query) == wanted) for name, query in queries]


async def _runs(api: ViewerApi, wanted: WantedBoard, cursor: str | None) -> bodies.Page[RunSummary]:
    if wanted.group:
        return bodies.Page(items=[], next=None)
    failed = str(bool(wanted.q) or wanted.sort == "state").lower()
    path, tag = "/v1/summaries", wanted.tag or None
    return await api.page(
        RunSummary, path, q=wanted.q, tag=tag, sort=wanted.sort, failed=failed, cursor=cursor, limit=RUNS_SHOWN
    )


async def _groups(api: ViewerApi, wanted: WantedBoard, cursor: str | None) -> bodies.Page[RunGroup]:
    """A page of all groups, if they are asked for."""
    if not wanted.group:
        return bodies.Page(items=[], next=None)
    return await api.page(RunGroup, "/v1/groups", metric=wanted.metric, mode=wanted.mode, cursor=cursor)


async def _group(api: ViewerApi, wanted: WantedBoard) -> GroupDetails | None:
    """The runs with the tag that is asked for, as a group."""
    if wanted.group or not wanted.tag:
        return None
    found = await shown(
        api.get(GroupDetails, f"/v1/groups/{quote(wanted.tag, safe='')}", metric=wanted.metric, mode=wanted.mode)
    )
    return found.value


def _metrics(runs: Sequence[RunSummary], groups: Sequence[RunGroup], wanted: WantedBoard) -> list[str]:
    """The metrics that the form offers."""
    names = {name for one in runs for name in one.metrics} | {name for group in groups for name in group.metrics}
    return sorted(names | {wanted.metric} - {""})


def grouped(alerts: Sequence[Alert]) -> list[AlertGroup]:
    """Alerts that are not acknowledged, by code, the most dangerous first; a code is as severe as its worst."""
    groups: dict[str, AlertGroup] = {}
    for one in alerts:
        if one.acknowledged is not None:
            continue
        known = groups.setdefault(one.code, AlertGroup(one.code, alert_actions.title(one.code), one.level, []))
        known.alerts.append(one)
    return sorted(groups.values(), key=lambda group: min(danger(one) for one in group.alerts))


def _boards(runs: Sequence[RunSummary], wanted: WantedBoard, first: bool) -> list[Board]:
    """Runs that train apart from the others, if they are asked for first."""
    if wanted.group:
        return []
    if wanted.sort != TRAINING_FIRST or wanted.q or wanted.tag or not first:
        return [_board("all", "Runs", runs, wanted)]
    training = [one for one in runs if one.life == "training"]
    others = [one for one in runs if one.life != "training"]
    above = [_board("training", "Training", training, wanted, TRAINING_UNFOLDED)] if training else []
    return [*above, _board("more-runs", "Other runs" if training else "Runs", others, wanted)]


def _board(id_: str, title: str, runs: Sequence[RunSummary], wanted: WantedBoard, unfolded: int = RUNS_SHOWN) -> Board:
    columns = refreshed_parts.run_columns(runs, wanted.metric, wanted.sort.removeprefix("-"))
    lines = [refreshed_parts.run_line(summary, columns) for summary in runs]
    return Board(id_, title, columns, lines[:unfolded], lines[unfolded:])


def _shown(group: AlertGroup, may: Callable[..., bool]) -> ShownGroup:
    parts = [refreshed_parts.alert(one, BACK, may, hint=False) for one in group.alerts]
    return ShownGroup(group, group.hint, parts[:UNFOLDED], parts[UNFOLDED:])


async def _under_way(api: ViewerApi) -> list[bodies.Round]:
    pages = await asyncio.gather(
        *(api.page(bodies.Round, "/v1/rounds", state=state, limit=20) for state in ("open", "sealed"))
    )
    return [item for page in pages for item in page.items]
