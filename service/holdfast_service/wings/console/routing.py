"""Page routes: errors become pages, and posted forms must come from our own pages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from math import nan
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from fastapi import APIRouter, Depends, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from holdfast_formats.body import first_mistake
from holdfast_formats.errors import CheckpointError, InvalidRequest, LimitExceeded
from holdfast_formats.rest.jobs import Arguments, Text
from holdfast_service.wings.console.rendering import as_page
from holdfast_service.wings.console.viewer_api import SignInNeeded

FORM_BYTES_MAX = 256 * 1024
FIELDS_MAX = 256
REAL_MAX = 1e15  # hours, gigabytes
_OWN_SITE = ("same-origin", "none")

Model = TypeVar("Model", bound=BaseModel)


class PageRoute(APIRoute):
    """The handler of every page, which renders errors as pages. FastAPI has this hook for it."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handle(request)
            except (CheckpointError, SignInNeeded) as error:
                return await as_page(request, error)
            except RequestValidationError as error:
                return await as_page(request, InvalidRequest(first_mistake(error)))

        return handled


def page_router() -> APIRouter:
    return APIRouter(include_in_schema=False, route_class=PageRoute)


class Form:
    """The fields of a submitted form, most of which occur once."""

    def __init__(self, fields: dict[str, list[str]]) -> None:
        self._fields = fields

    def text(self, name: str) -> str:
        return self._fields.get(name, [""])[0].strip()

    def all(self, name: str) -> list[str]:
        return [value.strip() for value in self._fields.get(name, [])]

    def lines(self, name: str) -> str:
        """Text of several lines, with line endings normalized."""
        return self.text(name).replace("\r\n", "\n")

    def need(self, *names: str) -> None:
        """`InvalidRequest` for the first of these fields that is empty."""
        for name in names:
            if not self.text(name):
                raise InvalidRequest(f"the field {name!r} is empty", hint="go back and fill it in")

    def arguments(self, model: type[Arguments]) -> dict[str, Any]:
        """What the fields say of a job's arguments; those that are empty are left out."""
        said: dict[str, Any] = {}
        for name, field in model.model_fields.items():
            key = field.alias or name
            if field.annotation is bool:
                said[key] = self.text(key) == "yes"
            elif field.annotation == int | None:
                said[key] = self.number(key)
            elif field.annotation == tuple[Text, ...]:
                said[key] = [line.strip() for line in self.lines(key).splitlines() if line.strip()]
            elif self.text(key):
                said[key] = self.text(key)
        return said

    def number(self, name: str) -> int | None:
        """A whole number, None if the field is empty; `InvalidRequest` for anything else."""
        text = self.text(name).replace(" ", "").replace("_", "")
        if not text:
            return None
        if not (text.isascii() and text.isdigit() and len(text) < 20):
            raise InvalidRequest(f"{name}: {self.text(name)!r} is not a whole number", hint="go back and change the field")
        return int(text)

    def real(self, name: str) -> float | None:
        """A number, None if the field is empty; `InvalidRequest` for anything else."""
        text = self.text(name)
        try:
            number = float(text) if text else None
        except ValueError:
            number = nan
        if number is not None and not -REAL_MAX < number < REAL_MAX:
            raise InvalidRequest(f"{name}: {text!r} is not a number", hint="go back and change the field")
        return number


def filled(model: type[Model], fields: dict[str, Any], hint: str = "go back and change the field") -> Model:
    """The form's body; `InvalidRequest` names an invalid field."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise InvalidRequest(first_mistake(error, "the form"), hint=hint) from error


async def _posted(request: Request) -> Form:
    """The form; `InvalidRequest` if another site's page sent it: the cookie alone does not authorize actions."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    foreign = site not in _OWN_SITE if site is not None else origin is not None and not _same(origin, request)
    if foreign:
        raise InvalidRequest(
            "this form was sent from another website", hint="open the page on this service and send the form again"
        )
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > FORM_BYTES_MAX:
            raise LimitExceeded(f"a form has at most {FORM_BYTES_MAX} bytes")
    try:
        return Form(parse_qs(body.decode(), keep_blank_values=True, max_num_fields=FIELDS_MAX))
    except ValueError as error:
        raise InvalidRequest("the form is not valid", hint="open the page again") from error


def _same(origin: str, request: Request) -> bool:
    return urlsplit(origin).netloc == request.url.netloc


Posted = Annotated[Form, Depends(_posted)]
