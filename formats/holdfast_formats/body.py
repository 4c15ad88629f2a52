"""The base of all our pydantic models, and what their mistakes are called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from holdfast_formats import model_building


class Invalid(Protocol):
    """A `ValidationError` of pydantic, or the error of FastAPI that has the same list."""

    def errors(self) -> Sequence[Any]: ...


def first_mistake(error: Invalid, whole: str = "") -> str:
    """The field of the first mistake and what is wrong with it; `whole` names the input if no single field is wrong."""
    where = ".".join(map(str, error.errors()[0]["loc"])) or whole
    return f"{where}: {message(error)}" if where else message(error)


def message(error: Invalid) -> str:
    """What is wrong, without the prefix that pydantic puts before the text of our own `ValueError`."""
    return str(error.errors()[0]["msg"]).removeprefix("Value error, ")


def _fail_at_the_first(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "tuple", "set", "frozenset"):
            schema["fail_fast"] = True
        for part in schema.values():
            _fail_at_the_first(part)
    elif isinstance(schema, list):
        for part in schema:
            _fail_at_the_first(part)


class Body(BaseModel):
    """A model; the settings of its subclasses are added to these.

    A list is refused at its first wrong item: pydantic would describe all, which for 4 MiB of invalid data takes gigabytes.
    """

    model_config = ConfigDict(defer_build=model_building.late())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_at_the_first(schema)
        return schema
