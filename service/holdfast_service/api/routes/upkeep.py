"""Route: whether the catalog says what the directories say."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from holdfast_formats.rest.consistency import CatalogCheck
from holdfast_service.api import problems
from holdfast_service.api.door.needs import ADMINS
from holdfast_service.api.services import Wired
from holdfast_service.control.checkpoints import consistency

router = APIRouter(prefix="/v1", tags=["operations"], responses=problems.RESPONSES)
Thorough = Annotated[bool, Query(description="read every manifest, also where storage says that nothing has changed")]


@router.get("/catalog/check", dependencies=ADMINS, summary="Whether the catalog says what the directories say")
def check_catalog(services: Wired, thorough: Thorough = False) -> CatalogCheck:
    """Every contradiction that lasts while saves and removals go on; `count` is 0 when there is none. Nothing is changed."""
    return consistency.check(services.tier, services.catalog, [services.node().name], thorough)
