"""Route: compare two checkpoints tensor by tensor."""

from __future__ import annotations

from bisect import bisect_right
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Depends, Query, Request

from holdfast_files.comparing import bytes_to_read
from holdfast_formats import dtypes
from holdfast_formats.disk.manifests import TensorEntry
from holdfast_formats.disk.packing import natural_key
from holdfast_formats.errors import InvalidRequest, LimitExceeded, NoSuchResource
from holdfast_formats.rest import bodies, comparing
from holdfast_formats.rest.comparing import Pair
from holdfast_formats.rest.measurements import Difference, DifferenceState, TensorHistogram
from holdfast_service.api import problems
from holdfast_service.api.access.authorization import needs
from holdfast_service.api.content import open_checkpoints
from holdfast_service.api.content.open_checkpoints import OpenedCheckpoints, decode_cursor, encode_cursor
from holdfast_service.api.services import Cursor, Limit, Wired
from holdfast_service.daemon.checking.comparing import ComparedCheckpoint, compare, histogram

EXACT_BYTES_MAX = 2**30  # one request reads no more; a job has no such limit

router = APIRouter(prefix="/v1", tags=["contents"], responses=problems.RESPONSES)
StepText = Annotated[str, Query(max_length=32, description="a step, or a selector such as `latest`")]


class ComparisonRequest(NamedTuple):
    """Query parameters: the two checkpoints and the tensors to compare."""

    left: bodies.CheckpointInfo
    right: bodies.CheckpointInfo
    group: str | None
    state: DifferenceState | None
    q: str

    def pairs(self, opened: OpenedCheckpoints) -> list[Pair]:
        held_a, held_b = (opened.open(side.run, side.step).contents for side in (self.left, self.right))
        listed = comparing.pairs(held_a, held_b, self.group)
        return [pair for pair in listed if self.q in pair.name and self.state in (None, pair.state)]


def _two(
    services: Wired,
    run: str,
    a: StepText,
    b: StepText,
    run_b: Annotated[str | None, Query(max_length=128, description="the run of b; default: the same run")] = None,
) -> tuple[bodies.CheckpointInfo, bodies.CheckpointInfo]:
    return open_checkpoints.find(services, run, a), open_checkpoints.find(services, run_b or run, b)


def _asked(
    two: Annotated[tuple[bodies.CheckpointInfo, bodies.CheckpointInfo], Depends(_two)],
    group: Annotated[str | None, Query(max_length=64, description="only this group")] = None,
    state: Annotated[
        DifferenceState | None, Query(description="only tensors in this state, according to the manifests")
    ] = None,
    q: Annotated[str, Query(max_length=256, description="only tensors whose names contain this")] = "",
) -> ComparisonRequest:
    left, right = two
    return ComparisonRequest(left, right, group, state, q)


@router.get("/runs/{run}/compare", dependencies=needs("read"), summary="Compare two checkpoints tensor by tensor")
def compare_checkpoints(
    request: Request,
    services: Wired,
    asked: Annotated[ComparisonRequest, Depends(_asked)],
    exact: Annotated[
        bool, Query(description="read the changed tensors and compute how much they differ; at most 1 GiB per page")
    ] = False,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> bodies.Page[Difference]:
    """Sorted by group, then by name in natural order. Digests decide what is equal; `exact` reads the rest and
    verifies every byte.

    The state `unknown` means that a tensor is split into other extents, so that only its bytes can decide. A
    `compare` job reads without a limit.
    """
    shown, behind = _page(asked.pairs(request.app.state.opened), cursor, limit)
    if not exact:
        return bodies.Page(items=[comparing.difference(pair) for pair in shown], next=behind)
    size = bytes_to_read(shown)
    if size > EXACT_BYTES_MAX:
        raise LimitExceeded(
            f"this page would read {size} bytes; one request may read at most {EXACT_BYTES_MAX}",
            hint='use a smaller `limit`, or submit a job: POST /v1/jobs {"kind": "compare", …}',
            bytes=size,
        )
    sides = ComparedCheckpoint(asked.left.run, asked.left.step), ComparedCheckpoint(asked.right.run, asked.right.step)
    return bodies.Page(items=list(compare(services.control.records, sides, shown)), next=behind)


class WantedHistogram(NamedTuple):
    """A tensor of a checkpoint, and the step whose values are taken away from it."""

    group: str
    name: str
    minus: str | None


def _histogram(
    group: Annotated[str, Query(max_length=64)],
    name: Annotated[str, Query(max_length=4096)],
    minus: Annotated[str | None, Query(max_length=32, description="of the difference to this step of the run")] = None,
) -> WantedHistogram:
    return WantedHistogram(group, name, minus)


@router.get(
    "/runs/{run}/checkpoints/{step}/histogram",
    dependencies=needs("read"),
    summary="TensorHistogram of a tensor's values, or of their change since another step",
)
def get_histogram(
    request: Request, services: Wired, run: str, step: str, wanted: Annotated[WantedHistogram, Depends(_histogram)]
) -> TensorHistogram:
    """Every byte is verified, and read twice; at most 1 GiB in all."""
    opened = request.app.state.opened
    b = ComparedCheckpoint(run, open_checkpoints.find(services, run, step).step)
    a = None if wanted.minus is None else ComparedCheckpoint(run, open_checkpoints.find(services, run, wanted.minus).step)
    entry = _entry(opened, b, wanted)
    pair = Pair(wanted.group, wanted.name, None if a is None else _entry(opened, a, wanted), entry)
    if dtypes.bits(entry.dtype) < 8:
        raise InvalidRequest(f"{wanted.name} is {entry.dtype}: types smaller than one byte have no histogram")
    if pair.a is not None and pair.state in ("reshaped", "retyped"):
        raise InvalidRequest(f"{wanted.name} has another shape or dtype in step {wanted.minus}: there is no difference")
    size = 2 * entry.nbytes * (1 if a is None else 2)
    if size > EXACT_BYTES_MAX:
        raise LimitExceeded(f"this would read {size} bytes; one request may read at most {EXACT_BYTES_MAX}", bytes=size)
    return histogram(services.control.records, b, pair, a)


def _entry(opened: OpenedCheckpoints, at: ComparedCheckpoint, wanted: WantedHistogram) -> TensorEntry:
    contents = opened.open(at.run, at.step).contents
    stored = contents.aliases.get(wanted.group, {}).get(wanted.name, wanted.name)
    entry = contents.tensors.get(wanted.group, {}).get(stored)
    if entry is None:
        raise NoSuchResource(f"{at.run}@{at.step} has no tensor {wanted.name!r} in {wanted.group!r}")
    return entry


def _page(pairs: list[Pair], cursor: str | None, limit: int) -> tuple[list[Pair], str | None]:
    first = 0
    if cursor is not None:
        group, name = decode_cursor(cursor, 2)
        first = bisect_right(pairs, (group, natural_key(name)), key=lambda pair: (pair.group, natural_key(pair.name)))
    shown = pairs[first : first + limit]
    more = first + limit < len(pairs)
    return shown, encode_cursor(shown[-1].group, shown[-1].name) if more else None
