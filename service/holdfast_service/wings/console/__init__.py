"""The admin pages at `/`: rendered on the server, from the public API only, which they call as the viewer."""

from holdfast_service.wings.console.pages import router
from holdfast_service.wings.console.pages.sign_in import sign_in_router
from holdfast_service.wings.console.static import router as static_router

__all__ = ["router", "sign_in_router", "static_router"]
