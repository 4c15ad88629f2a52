"""Compares two checkpoints of a run, tensor by tensor. Digests prove equality; distances are computed from bytes."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import lru_cache, partial
from itertools import takewhile
from typing import Annotated, Any, NamedTuple, get_args

from fastapi import Depends, Query, Request
from starlette.responses import Response

from holdfast_formats.errors import CheckpointError
from holdfast_formats.rest import bodies, comparing
from holdfast_formats.rest.comparing import Pair
from holdfast_formats.rest.jobs import CompareArguments, CompareJob
from holdfast_formats.rest.measurements import Difference, DifferenceState
from holdfast_formats.rest.operations import Job
from holdfast_service.wings.console import manifest_view
from holdfast_service.wings.console.manifest_view import ManifestView, MeasuredTensor
from holdfast_service.wings.console.rendering import page, see
from holdfast_service.wings.console.routing import Posted, page_router
from holdfast_service.wings.console.viewer_api import Asked, ViewerApi, at, shown, to

router = page_router()

SHOWN = 50
COMPARED_MAX = 1  # each holds both manifests
STEPS_OFFERED = 200
JOBS_LOOKED_AT = 200
STATES: tuple[str, ...] = get_args(DifferenceState)
Text = Annotated[str, Query(max_length=200)]
Known = dict[tuple[str, str], MeasuredTensor]


def _asked(
    a: Text = "", b: Text = "", q: Text = "", state: Text = "", sort: Text = "relative", exact: Text = ""
) -> dict[str, str]:
    return {"a": a, "b": b, "q": q, "state": state, "sort": sort, "exact": exact}


Wanted = Annotated[dict[str, str], Depends(_asked)]
Ticked = Annotated[list[int] | None, Query(max_length=STEPS_OFFERED)]


@router.get("/runs/{run}/compare")
async def show_compare(
    request: Request, api: Asked, run: str, asked: Wanted, step: Ticked = None, first: int = 0
) -> Response:
    """`a` is the older step, `b` the newer one; without them, the oldest and the newest of the ticked steps, or the two
    newest ones. `exact` reads the bytes of shown tensors.
    """
    listed = await api.page(bodies.CheckpointInfo, at(run) + "/checkpoints", limit=STEPS_OFFERED)
    asked |= _two(asked, step or _began(listed.items), [one.step for one in listed.items if one.state != "damaged"])
    render = partial(page, request, "compare.html", run=run, steps=listed.items, asked=asked, states=STATES)
    if not (asked["a"] and asked["b"]):
        return render(compared=None)
    checkpoints = [await api.get(bodies.CheckpointInfo, at(run, asked[side])) for side in ("a", "b")]
    one, other = [await manifest_view.held(api, run, pairs_found.step) for pairs_found in checkpoints]
    known = [(await manifest_view.statistics(api, held)).value or {} for held in (one, other)]
    compared = await asyncio.to_thread(compare, one, other)
    job = await _job(api, run, one.manifest.step, other.manifest.step)
    values = Values(one.manifest.step, known[0], known[1], _of_the_job(job))
    pairs_found = await asyncio.to_thread(matching, compared, values, asked)
    begin = min(max(first, 0), max(len(pairs_found) - 1, 0) // SHOWN * SHOWN)
    part = [values.difference(pair) for pair in pairs_found[begin : begin + SHOWN]]
    too_much: CheckpointError | None = None
    if asked["exact"]:
        part, too_much = await _measured(api, run, asked, part)
    return render(
        compared=checkpoints,
        counts=compared.counts,
        bytes_changed=compared.bytes_changed,
        measured=bool(known[0] and known[1]),
        too_much=too_much,
        job=job,
        found=len(pairs_found),
        shown=part,
        first=begin,
        shown_at_once=SHOWN,
    )


def _two(asked: dict[str, str], ticked: list[int], steps: list[int]) -> dict[str, str]:
    """The steps to compare: as asked; else of the ticked ones; else the newest, with the one before."""
    newer = max(ticked or steps, default=None)
    older = min(ticked, default=newer)
    if newer is not None and older == newer:
        older = max((step for step in steps if step < newer), default=None)
        if older is None:  # the oldest one was ticked
            older, newer = newer, min((step for step in steps if step > newer), default=None)
    found = {"a": older, "b": newer} if older is not None and newer is not None else {"a": "", "b": ""}
    return {side: asked[side] or str(step) for side, step in found.items()}


def _began(newest_first: list[bodies.CheckpointInfo]) -> list[int]:
    """Of a run that ends with NaN, the last healthy step and the first unhealthy one; nothing otherwise."""
    sound = [one for one in newest_first if one.state != "damaged" and not one.abandoned]
    ill = list(takewhile(lambda one: one.healthy is False, sound))
    return [sound[len(ill)].step, ill[-1].step] if ill and len(ill) < len(sound) else []


@router.post("/runs/{run}/compare")
async def compare_bytes(api: Asked, run: str, form: Posted) -> Response:
    """Compare all changed bytes in a job, which has progress, can be cancelled, and keeps its result."""
    a, b = [(await api.get(bodies.CheckpointInfo, at(run, form.text(side) or "latest"))).step for side in ("a", "b")]
    await api.submit(CompareJob(run=run, step=a, arguments=CompareArguments(other=str(b))))
    return see(f"{to(run)}/compare", "comparing", a=str(a), b=str(b))


async def _job(api: ViewerApi, run: str, a: int, b: int) -> Job | None:
    """The newest job that compares these two, a running one before failed ones."""
    jobs = await shown(api.page(Job, "/v1/jobs", kind="compare", run=run, limit=JOBS_LOOKED_AT))
    listed = jobs.value.items if jobs.value else []
    return next((job for job in listed if job.step == a and str(job.arguments.get("with")) in (str(b), f"{run}@{b}")), None)


def _of_the_job(job: Job | None) -> dict[tuple[str, str], Difference]:
    """The tensors that changed most, with the distances that the job has computed."""
    if job is None or job.state != "done" or not job.result:
        return {}
    return {(one["group"], one["name"]): Difference.model_validate(one) for one in job.result.get("most", ())}


class Compared(NamedTuple):
    """Every tensor of either checkpoint, in the order of the lists, with its state, and the number in each state."""

    pairs: list[tuple[Pair, DifferenceState]]
    counts: dict[str, int]
    bytes_changed: int


class Distances(NamedTuple):
    """How far a tensor moved, as far as that is known; `nonfinite` if one side has NaN or infinity."""

    norm_a: float | None
    norm_b: float | None
    change: float | None
    relative: float | None
    nonfinite: bool


class Values(NamedTuple):
    """The statistics of tensors in both saves, of the older step and of the newer one, and what a job has compared."""

    step: int
    before: Known
    after: Known
    compared: dict[tuple[str, str], Difference]

    def distances(self, pair: Pair) -> Distances:
        key = (pair.group, pair.name)
        exact = self.compared.get(key)
        if exact is not None:
            return Distances(exact.norm_a, exact.norm_b, exact.change, exact.relative, comparing.has_nonfinite(exact))
        before, after = self.before.get(key), self.after.get(key)
        norm_a = before.norm if before and not before.nonfinite else None
        norm_b = after.norm if after and not after.nonfinite else None
        sick = any(side and side.nonfinite for side in (before, after))
        if pair.state == "equal" and not sick:
            return Distances(norm_a, norm_b, 0.0, 0.0, sick)
        change = after.change if not sick and after is not None and after.changed_from == self.step else None
        return Distances(norm_a, norm_b, change, change / norm_a if change is not None and norm_a else None, sick)

    def difference(self, pair: Pair) -> Difference:
        exact = self.compared.get((pair.group, pair.name))
        if exact is not None:
            return exact
        found: dict[str, Any] = self.distances(pair)._asdict()
        made = comparing.difference(pair)
        if found.pop("nonfinite"):
            sides = (("nonfinite_a", self.before), ("nonfinite_b", self.after))
            found["detail"] = made.detail | {
                name: values.nonfinite for name, side in sides if (values := side.get((pair.group, pair.name)))
            }
        return made.model_copy(update=found)


@lru_cache(maxsize=COMPARED_MAX)
def compare(one: ManifestView, other: ManifestView) -> Compared:
    """Compare two checkpoints. The newest result is cached for sorting, searching and paging."""
    pairs = [(pair, pair.state) for pair in comparing.pairs(one.manifest, other.manifest)]
    counted = Counter[str](state for _, state in pairs)
    changed = sum(pair.entry.nbytes for pair, state in pairs if state == "changed")
    return Compared(pairs, {name: counted[name] for name in STATES}, changed)


def matching(compared: Compared, values: Values, asked: dict[str, str]) -> list[Pair]:
    """The tensors whose names contain every word of the search, sorted: the largest first, unknown values last."""
    words, sort = asked["q"].casefold().split(), asked["sort"]
    matching_pairs = [
        pair
        for pair, state in compared.pairs
        if asked["state"] in ("", state) and all(word in pair.name.casefold() for word in words)
    ]
    if sort == "name":
        return matching_pairs
    if sort == "bytes":
        return sorted(matching_pairs, key=lambda pair: -pair.entry.nbytes)

    def key(pair: Pair) -> tuple[float, float, float]:
        found = values.distances(pair)
        if sort == "norm_b":
            return not found.nonfinite, -(found.norm_b or 0.0), 0
        return comparing.largest_first(pair, found.relative, found.nonfinite)

    return sorted(matching_pairs, key=key)


async def _measured(
    api: ViewerApi, run: str, asked: dict[str, str], part: list[Difference]
) -> tuple[list[Difference], CheckpointError | None]:
    """The same tensors with their bytes compared, or the error that they are too many for one page."""

    async def measured(one: Difference) -> Difference:
        if one.state not in ("changed", "unknown"):
            return one
        path = at(run) + "/compare"
        differences = await api.page(Difference, path, a=asked["a"], b=asked["b"], group=one.group, q=one.name, exact="true")
        return next((other for other in differences.items if other.name == one.name), one)

    try:
        return list(await asyncio.gather(*map(measured, part))), None
    except CheckpointError as error:
        return part, error
