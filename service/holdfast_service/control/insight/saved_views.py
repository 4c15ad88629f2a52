"""Saved views of the overview, in a file of the root, so that they outlast the catalog."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest, LimitExceeded, NoSuchResource
from holdfast_formats.rest.views import View, ViewQuery, ViewRequest, check_view_name
from holdfast_service.control.insight.run_orders import RunOrder
from holdfast_service.storage import Records
from holdfast_service.storage.map_file import MapContent, MapFile

VIEWS_MAX = 100


def _name(name: str) -> str:
    try:
        return check_view_name(name)
    except InvalidRequest as error:
        raise ValueError(error.detail) from error


class _File(MapContent[ViewRequest]):
    entries: dict[Annotated[str, AfterValidator(_name)], ViewRequest] = Field(default_factory=dict, alias="views")


class SavedViews:
    """The views of one root. Thread-safe."""

    def __init__(self, records: Records) -> None:
        hint = "move the file away; then an admin saves the views again on the overview"
        self._file = MapFile(records, naming.VIEWS, _File, hint)

    def all(self) -> list[View]:
        """By name; `CorruptManifest` if the file cannot be read."""
        return [_view(name, query) for name, query in sorted(self._file.read().items())]

    def put(self, name: str, query: ViewRequest) -> View:
        """Save a view, or replace the one of this name; `InvalidRequest` for a name or an order that is not allowed."""
        check_view_name(name)
        RunOrder.parse(query.sort)

        def put(views: dict[str, ViewRequest]) -> None:
            views[name] = query
            if len(views) > VIEWS_MAX:
                raise LimitExceeded(f"there are already {VIEWS_MAX} saved views", hint="remove one first")

        self._file.change(put)
        return _view(name, query)

    def remove(self, name: str) -> None:
        """`NoSuchResource` if there is none of this name."""

        def drop(views: dict[str, ViewRequest]) -> None:
            if views.pop(name, None) is None:
                raise NoSuchResource(f"there is no saved view {name!r}", hint="`GET /v1/views` lists them")

        self._file.change(drop)


def _view(name: str, query: ViewQuery) -> View:
    return View(name=name, **query.model_dump())
