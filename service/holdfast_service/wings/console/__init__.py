"""The dashboard: pages at `/`, rendered on the server, from the public API only. README.md describes this wing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast_service.wing import Wing

if TYPE_CHECKING:
    from fastapi import Request
    from fastapi.responses import HTMLResponse

    from holdfast_formats.errors import CheckpointError


def _problem_page(request: Request, error: CheckpointError) -> HTMLResponse:
    from holdfast_service.wings.console.rendering import problem_page  # a daemon without pages starts without Jinja

    return problem_page(request, error)


WING = Wing("console", routes=f"{__name__}.routes", problem_page=_problem_page)
