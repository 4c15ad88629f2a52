"""The admin pages at `/`: rendered on the server, from nothing but the public API, which they ask as the viewer."""

from .pages import router

__all__ = ["router"]
