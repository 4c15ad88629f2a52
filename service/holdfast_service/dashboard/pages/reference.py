"""The API's reference: every route and every body, from the API's own description."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from holdfast_service.dashboard import described
from holdfast_service.dashboard.asking import Asked
from holdfast_service.dashboard.rendering import page
from holdfast_service.dashboard.routing import page_router

router = page_router()


@router.get("/api")
async def show_reference(request: Request, api: Asked) -> Response:
    """One page, so that the browser's search finds everything."""
    answer = (await api.ask("GET", "/openapi.json")).json()
    subjects = described.subjects(answer)
    return page(
        request,
        "reference.html",
        version=answer["info"]["version"],
        about=answer["info"].get("description", ""),
        subjects=subjects,
        count=sum(len(subject.operations) for subject in subjects),
        models=described.models(answer),
    )
