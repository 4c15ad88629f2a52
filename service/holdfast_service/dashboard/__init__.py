"""The admin pages at `/`: rendered on the server, from the public API only, which they call as the viewer."""

from .pages import router

__all__ = ["router"]
