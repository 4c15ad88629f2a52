"""The dashboard: pages at `/`, rendered on the server, from the public API only. README.md describes this wing."""

from holdfast_service.wing import Wing
from holdfast_service.wings.console.rendering import problem_page

WING = Wing("console", routes=f"{__name__}.routes", problem_page=problem_page)
