"""The tensors of a checkpoint: searched, sorted, a page at a time, however many there are; and the histograms of one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

from fastapi import Depends, Query, Request
from starlette.responses import Response

from holdfast_formats.rest import bodies
from holdfast_formats.rest.measurements import TensorHistogram, TensorStatistics
from holdfast_service.wings.console import manifest_view
from holdfast_service.wings.console.manifest_view import ManifestView, MeasuredTensor, TensorLine
from holdfast_service.wings.console.rendering import page
from holdfast_service.wings.console.routing import page_router
from holdfast_service.wings.console.viewer_api import Asked, PagePart, ViewerApi, at, shown

router = page_router()

TENSORS_SHOWN = 50
Key = Callable[[TensorLine, MeasuredTensor | None], Any]
Known = Mapping[tuple[str, str], MeasuredTensor]
# The sort orders; the largest come first, unknown values last.
SORTS: dict[str, Key] = {
    "bytes": lambda line, _: line.entry.nbytes,
    "norm": lambda _, measured: measured and measured.norm,
    "change": lambda _, measured: measured and measured.relative,
    "nonfinite": lambda _, measured: measured and measured.nonfinite,
    "zeros": lambda _, measured: measured and measured.zeros,
}
# If there are too many tensors to show all with their statistics, the API sorts by these.
SORTED_THERE = ("change", "nonfinite", "zeros")
Text = Annotated[str, Query(max_length=200)]


class Search(NamedTuple):
    """What the list shows: names with all words of `q`, of one group or all, in an order."""

    q: str
    group: str
    sort: str
    first: int = 0
    cursor: str | None = None

    @property
    def said(self) -> dict[str, Any]:
        return {"q": self.q, "group": self.group, "sort": self.sort}


class FoundTensors(NamedTuple):
    """A page of tensors. Either all matches are counted, or `next` is the cursor of the next page."""

    lines: list[TensorLine]
    known: Known | None
    matches: int | None
    first: int = 0
    next: str | None = None


def _search(q: Text = "", group: Text = "", sort: Text = "name", first: int = 0, cursor: str | None = None) -> Search:
    return Search(q, group, sort if sort in SORTS else "name", max(first, 0), cursor)


Wanted = Annotated[Search, Depends(_search)]


@router.get("/runs/{run}/checkpoints/{step}/tensors")
async def show_tensors(request: Request, api: Asked, run: str, step: str, wanted: Wanted) -> Response:
    """A page of tensors, with the statistics from reading their bytes back."""
    checkpoint = await api.get(bodies.CheckpointInfo, at(run, step))
    held = await manifest_view.held(api, run, checkpoint.step)
    measured = await manifest_view.statistics(api, held)
    many = held.tensors > manifest_view.STATISTICS_MAX
    page_part: PagePart[FoundTensors] = PagePart(None, measured.error)
    if many and wanted.sort in SORTED_THERE:
        page_part = await shown(_sorted_there(api, held, wanted))
        if page_part.error is not None and not page_part.absent:  # there may be no statistics, as of one that was compacted
            raise page_part.error
    value = page_part.value
    if value is None:
        value = await asyncio.to_thread(_sorted_here, held, measured.value, wanted)
    return page(
        request,
        "tensors.html",
        run=run,
        made=checkpoint,
        found=value,
        why=page_part.error if value.known is None else None,
        many=many,
        sorts=("bytes", *SORTED_THERE) if many else tuple(SORTS),
        begun=wanted.cursor is not None,
        shown_at_once=TENSORS_SHOWN,
        **wanted.said,
    )


def _sorted_here(held: ManifestView, known: Known | None, wanted: Search) -> FoundTensors:
    lines = select(held.lines, known or {}, wanted)
    begin = min(wanted.first, max(len(lines) - 1, 0) // TENSORS_SHOWN * TENSORS_SHOWN)
    return FoundTensors(lines[begin : begin + TENSORS_SHOWN], known, len(lines), begin)


async def _sorted_there(api: ViewerApi, held: ManifestView, wanted: Search) -> FoundTensors:
    path = at(held.manifest.run, held.manifest.step, "statistics")
    listed = await api.page(TensorStatistics, path, **wanted.said, cursor=wanted.cursor, limit=TENSORS_SHOWN)
    tensors = held.manifest.tensors
    lines = [TensorLine(item.group, item.name, tensors[item.group][item.name], None) for item in listed.items]
    known = {(item.group, item.name): manifest_view.measured(item) for item in listed.items}
    return FoundTensors(lines, known, None, next=listed.next)


def select(lines: list[TensorLine], measured: Known, wanted: Search) -> list[TensorLine]:
    """The tensors whose names contain every word of the search, in the requested order."""
    words = wanted.q.casefold().split()
    found = [
        line for line in lines if wanted.group in ("", line.group) and all(word in line.name.casefold() for word in words)
    ]
    key = SORTS.get(wanted.sort)
    if key is None:
        return found

    def largest_first(line: TensorLine) -> tuple[bool, float]:
        value = key(line, measured.get((line.group, line.alias_of or line.name)))
        return (value is None, -float(value or 0))

    return sorted(found, key=largest_first)


class DrawnHistogram(NamedTuple):
    """A histogram with its title, or why there is none."""

    title: str
    found: PagePart[TensorHistogram]

    @property
    def bars(self) -> list[float]:
        """Heights, as fractions of the highest."""
        counts = self.found.value.counts if self.found.value else []
        return [count / max(counts) for count in counts]


@router.get("/runs/{run}/checkpoints/{step}/histogram")
async def show_histogram(  # noqa: PLR0913 — one parameter a filter
    request: Request,
    api: Asked,
    run: str,
    step: str,
    group: Annotated[str, Query(max_length=64)],
    name: Annotated[str, Query(max_length=4096)],
    minus: Annotated[str, Query(max_length=32)] = "",
) -> Response:
    """Of the tensor in this step; with `minus`, also in that step, and of the difference."""
    checkpoint = await api.get(bodies.CheckpointInfo, at(run, step))
    wanted = [(f"Step {checkpoint.step}", checkpoint.step, "")]
    if minus:
        before = await api.get(bodies.CheckpointInfo, at(run, minus))
        change = (f"Change from step {before.step} to {checkpoint.step}", checkpoint.step, str(before.step))
        wanted = [change, (f"Step {before.step}", before.step, ""), *wanted]
    found = await asyncio.gather(
        *(
            shown(api.get(TensorHistogram, at(run, of, "histogram"), group=group, name=name, minus=less))
            for _, of, less in wanted
        )
    )
    drawn = [DrawnHistogram(title, one) for (title, _, _), one in zip(wanted, found, strict=True)]
    return page(request, "histogram.html", run=run, made=checkpoint, group=group, name=name, minus=minus, drawn=drawn)
