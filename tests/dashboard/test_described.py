"""The API's description as a page shows it: all of it is there, and types are words."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from holdfast_service.dashboard import described
from tests.dashboard.reading import Page
from tests.serving import Served


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string"}, "text"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "whole number or null"),
        ({"type": "array", "items": {"$ref": "#/components/schemas/Run"}}, "list of Run"),
        ({"type": "array", "prefixItems": [{"type": "string"}, {"type": "number"}]}, "list of text, number"),
        ({"type": "object", "additionalProperties": {"type": "number"}}, "object of number"),
        ({"type": "object", "additionalProperties": True}, "object"),
        ({"enum": ["min", "max"], "type": "string"}, '"min" | "max"'),
        ({"const": "loss"}, '"loss"'),
        ({"type": "string", "format": "binary"}, "bytes"),
        ({}, "anything"),
    ],
)
def test_types_in_words(schema: dict[str, Any], words: str) -> None:
    assert "".join(piece.text for piece in described.type_of(schema)) == words


def test_a_reference_links_to_its_body() -> None:
    pieces = described.type_of({"anyOf": [{"$ref": "#/components/schemas/Run"}, {"type": "null"}]})
    assert [piece.model for piece in pieces] == ["Run", None, None]


@pytest.mark.parametrize(
    ("most", "words"), [(2**63 - 1, "2^63 - 1"), (2.0**62, "2^62"), (2**53, str(2**53)), (2**60 + 5, str(2**60 + 5))]
)
def test_limits_of_many_bits_are_powers(most: float, words: str) -> None:
    schema = {"parameters": [{"name": "step", "in": "query", "schema": {"type": "integer", "maximum": most}}]}
    (subject,) = described.subjects({"paths": {"/v1/x": {"get": schema}}})
    assert subject.operations[0].fields[0].limits == f"at most {words}"


def test_limits_and_defaults() -> None:
    """Those of a choice count too, and a default of nothing is none."""
    schema = {"anyOf": [{"type": "integer", "minimum": 0.0, "maximum": 9}, {"type": "null"}], "default": None}
    parameter = {"name": "step", "in": "query", "schema": schema, "description": "only  this\nstep"}
    one = {"parameters": [parameter], "responses": {"204": {"description": "Gone"}}, "x-scope": "write"}
    (subject,) = described.subjects({"paths": {"/v1/x/{run}": {"delete": one}}})
    (operation,) = subject.operations
    (field,) = operation.fields
    assert subject.name == "other" and operation.anchor == "delete-v1-x-run" and operation.scope == "write"
    assert (field.limits, field.default, field.required, field.description) == (
        "at least 0, at most 9",
        None,
        False,
        "only this step",
    )
    assert operation.curl == 'curl -X DELETE -H "Authorization: Bearer $TOKEN" "$URL/v1/x/{run}"'
    assert [(answer.status, answer.type, answer.description) for answer in operation.answers] == [("204", (), "Gone")]


def test_all_of_the_api_is_on_the_page(service: Served) -> None:
    """Every route once, each body, and no link to a body that is not there."""
    said = httpx.get(service.url + "/openapi.json", trust_env=False).json()
    operations = [one for subject in described.subjects(said) for one in subject.operations]
    assert sorted((one.method.lower(), one.path) for one in operations) == sorted(
        (method, path) for path, methods in said["paths"].items() for method in methods
    )
    assert len({one.anchor for one in operations}) == len(operations)
    assert {model.name for model in described.models(said)} == set(said["components"]["schemas"])
    page = Page(httpx.get(service.url + "/api", trust_env=False).text)
    ids = {element.attributes.get("id") for element in page.all("details")}
    assert {at.removeprefix("#") for at in page.addresses() if at.startswith("#body-")} <= ids
    assert {one.anchor for one in operations} <= ids


def test_the_scope_that_is_said_is_the_one_that_is_asked_for(service: Served) -> None:
    """What anybody may read has none; what changes something has one."""
    said = httpx.get(service.url + "/openapi.json", trust_env=False).json()["paths"]
    assert "x-scope" not in said["/healthz"]["get"] and said["/v1/runs"]["get"]["x-scope"] == "read"
    assert said["/v1/jobs"]["post"]["x-scope"] == "write" and said["/v1/tokens"]["post"]["x-scope"] == "admin"
    assert all(
        one["x-scope"] for methods in said.values() for method, one in methods.items() if method not in ("get", "head")
    )
