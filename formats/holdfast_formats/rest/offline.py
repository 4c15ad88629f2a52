"""What commands have `holdfast_service.offline` do: one document on its standard input."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from holdfast_formats.body import Body, first_mistake
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest.jobs import ConvertArguments, ImportJob, MergeJob, Text, VerifyJob
from holdfast_formats.rest.operations import RotationRequest, TokenRequest


class _Work(Body):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RootJob(_Work):
    """A job in a root that no daemon serves: an import, a merge, or a repair from replicas, which are directories."""

    act: Literal["job"] = "job"
    root: Text
    job: Annotated[VerifyJob | ImportJob | MergeJob, Field(discriminator="kind")]
    replicas: tuple[str, ...] = ()
    progress: bool = False


class DirectoryConversion(_Work):
    """A directory for another program, of any directory that import reads."""

    act: Literal["convert"] = "convert"
    arguments: ConvertArguments
    progress: bool = False


class CatalogWork(_Work):
    """Work on the catalog of a root that no daemon serves."""

    act: Literal["check", "check-thorough", "rebuild", "adopt"]
    root: Text
    catalog: str | None = None


class TokenWork(_Work):
    """Work on the tokens of a root, served or not."""

    act: Literal["token-create", "token-rotate", "token-revoke", "token-list"]
    root: Text
    catalog: str | None = None
    name: str = ""
    create: TokenRequest | None = None
    rotate: RotationRequest = Field(default_factory=RotationRequest)


OfflineWork = RootJob | DirectoryConversion | CatalogWork | TokenWork


def parse(text: str) -> OfflineWork:
    """The work that a document describes; `InvalidRequest` for anything else."""
    try:
        return TypeAdapter(Annotated[OfflineWork, Field(discriminator="act")]).validate_json(text)
    except ValidationError as error:
        raise InvalidRequest(first_mistake(error), hint="`holdfast` starts it") from None
