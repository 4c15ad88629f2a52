"""The base of all our pydantic models."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from holdfast_formats import model_building


class Body(BaseModel):
    """A model; the settings of its subclasses are added to these."""

    model_config = ConfigDict(defer_build=model_building.late())
