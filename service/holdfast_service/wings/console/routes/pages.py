"""Routes: every page. What a page shows comes from the public API, which is asked in the viewer's name."""

from __future__ import annotations

from fastapi import APIRouter

from holdfast_service.api.access import bodies
from holdfast_service.api.access.authorization import needs
from holdfast_service.wings.console import pages, static
from holdfast_service.wings.console.pages.sign_in import sign_in_router

router = APIRouter()
router.include_router(pages.router, dependencies=needs("read", "viewer", bodies.FORM))
router.include_router(sign_in_router, dependencies=needs(None, "none", bodies.FORM, act="signed-in"))
router.include_router(static.router, dependencies=needs(None, "none", bodies.FORM))
