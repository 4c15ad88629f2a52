"""Routes: the search for runs and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from fastapi import APIRouter, Query

from holdfast_formats.errors import Damaged
from holdfast_formats.rest.search import SearchResult
from holdfast_service.api import problems
from holdfast_service.api.access.authorization import needs
from holdfast_service.api.services import Wired
from holdfast_service.control.catalog.search import SearchQuery

HITS_MAX = 100

router = APIRouter(prefix="/v1", tags=["runs"], responses=problems.RESPONSES)
Sought = Annotated[str, Query(max_length=256, description="parts of a run's name, RUN@STEP, a step's digits, or a label")]
Most = Annotated[int, Query(ge=1, le=HITS_MAX, description="maximum number of hits")]


@router.get("/search", dependencies=needs("read"), summary="Search runs, steps and labels for text")
def search(services: Wired, q: Sought = "", limit: Most = 20) -> SearchResult:
    """Capitals do not matter. Words are parts of a run's name, the last one perhaps of a label or a step. Labels of the
    first 500 runs are searched.
    """

    def labels_of(run: str) -> Mapping[str, Sequence[int]]:
        try:
            return services.control.files.shown(run).labels
        except Damaged:  # its own page reports that
            return {}

    match = services.control.catalog.search(SearchQuery.parse(q), limit + 1, labels_of)
    return SearchResult(items=match[:limit], more=len(match) > limit)
