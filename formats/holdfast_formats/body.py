"""The base of all our pydantic models."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from holdfast_formats import model_building


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
