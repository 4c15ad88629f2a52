"""One module per page, or for a few related ones: what each has as its `router` is served."""

from importlib import import_module
from pkgutil import walk_packages

from fastapi import APIRouter

router = APIRouter(include_in_schema=False)
for _module in walk_packages(__path__, f"{__name__}."):
    _page = import_module(_module.name)
    if hasattr(_page, "router"):
        router.include_router(_page.router)

__all__ = ["router"]
