"""The trash: deleted runs, which can be restored or removed for good."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request
from starlette.responses import Response

from holdfast_formats.errors import InvalidRequest, NoSuchRun
from holdfast_formats.rest.runs import Trash
from holdfast_service.wings.console.rendering import page, see
from holdfast_service.wings.console.routing import Posted, page_router
from holdfast_service.wings.console.viewer_api import Asked, at, shown, to

router = page_router()

RUNS_SHOWN = 50


@router.get("/trash")
async def show_trash(request: Request, api: Asked, first: Annotated[int, Query(ge=0)] = 0) -> Response:
    """A page of it, and the space that all of it takes."""
    trash = await shown(api.get(Trash, "/v1/trash"))
    return page(request, "trash.html", trash=trash, first=first, shown_at_once=RUNS_SHOWN)


@router.post("/runs/{run}/undelete")
async def undelete(api: Asked, run: str, form: Posted) -> Response:
    await api.request("POST", at(run) + "/undelete", entry=form.text("entry"))
    return see(to(run), "undeleted")


@router.get("/runs/{run}/purge")
async def confirm_purge(request: Request, api: Asked, run: str) -> Response:
    """Show what would be removed for good, before anything happens."""
    trash = await api.get(Trash, "/v1/trash")
    items = [one for one in trash.items if one.run == run]
    if not items:
        raise NoSuchRun(f"the trash holds no run {run!r}", hint="see the Trash page")
    return page(request, "purge.html", run=run, items=items)


@router.post("/runs/{run}/purge")
async def purge(api: Asked, run: str, form: Posted) -> Response:
    """Remove it for good, if its name was typed once more."""
    if form.text("confirm") != run:
        raise InvalidRequest(
            f"you typed {form.text('confirm')!r}, but the run is {run!r}", hint="go back and type the run's name"
        )
    await api.request("DELETE", at(run) + "/trash", entry=form.text("entry"))
    return see("/trash", "purged")
