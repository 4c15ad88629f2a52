"""Route: compare the catalog with the directories."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from holdfast_formats.rest.consistency import CatalogCheck
from holdfast_service.api import problems
from holdfast_service.api.access.authorization import needs
from holdfast_service.api.services import Wired
from holdfast_service.control.checkpoints import consistency

router = APIRouter(prefix="/v1", tags=["operations"], responses=problems.RESPONSES)
Thorough = Annotated[bool, Query(description="read every manifest, also those that did not change on storage")]


@router.get("/catalog/check", dependencies=needs("admin", "all"), summary="Compare the catalog with the directories")
def check_catalog(services: Wired, thorough: Thorough = False) -> CatalogCheck:
    """Lists contradictions that last while saves and removals continue; `count` is 0 if there are none. Changes
    nothing.
    """
    writers = {services.node().name, *(node.name for node in services.control.nodes.members() if node.live)}
    return consistency.check(services.control.store, services.control.catalog, writers, thorough)
