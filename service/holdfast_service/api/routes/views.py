"""Routes: saved views of the overview, which a team shares."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from holdfast_formats.rest import bodies
from holdfast_formats.rest.views import NAME_CHARACTERS, View, ViewRequest
from holdfast_service.api import problems
from holdfast_service.api.access.authorization import needs
from holdfast_service.api.services import Wired

router = APIRouter(prefix="/v1", tags=["runs"], responses=problems.RESPONSES)
Name = Annotated[str, Path(description=NAME_CHARACTERS)]


@router.get("/views", dependencies=needs("read", "none"), summary="Saved views of the overview; sorted by name")
def list_views(services: Wired) -> bodies.Page[View]:
    """All of them, whatever runs the caller may see: a view is what an admin wrote, and shows only runs that its viewer may
    see.
    """
    return bodies.Page(items=services.views.all(), next=None)


@router.put(
    "/views/{name}",
    dependencies=needs("admin", "all", act="view-set"),
    summary="Save a view, or replace the one of this name",
)
def set_view(services: Wired, name: Name, wanted: ViewRequest) -> View:
    return services.views.put(name, wanted)


@router.delete(
    "/views/{name}", dependencies=needs("admin", "all", act="view-removed"), status_code=204, summary="Remove a saved view"
)
def remove_view(services: Wired, name: Name) -> None:
    services.views.remove(name)
