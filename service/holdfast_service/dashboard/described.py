"""Converts the API's OpenAPI description for a page: routes by subject, and types in words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_LIMITS = {
    "minimum": "at least {}",
    "maximum": "at most {}",
    "exclusiveMinimum": "more than {}",
    "exclusiveMaximum": "less than {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "pattern": "matches {}",
}
_COUNTED_MAX = 2**53
_WORDS = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false", "null": "null"}


class Phrase(NamedTuple):
    """A piece of a type in words; `model` is the body that the page links to."""

    text: str
    model: str | None = None


class Field(NamedTuple):
    """A parameter of a route or a member of a body. `place`: path, query or header; empty for a member."""

    name: str
    place: str
    type: tuple[Phrase, ...]
    limits: str
    required: bool
    default: str | None
    description: str


class RouteAnswer(NamedTuple):
    """A response of a route: its status, media types, and meaning."""

    status: str
    media: str
    type: tuple[Phrase, ...]
    description: str


class Operation(NamedTuple):
    """A route with a method. `scope` is the required one, None for none."""

    method: str
    path: str
    anchor: str
    summary: str
    description: str
    scope: str | None
    fields: tuple[Field, ...]
    body: tuple[Phrase, ...]
    body_media: str
    answers: tuple[RouteAnswer, ...]
    curl: str


class Subject(NamedTuple):
    """The routes of one tag."""

    name: str
    description: str
    operations: tuple[Operation, ...]


class DescribedBody(NamedTuple):
    """A body, by the name that types link to."""

    name: str
    description: str
    fields: tuple[Field, ...]


def subjects(described: Mapping[str, Any]) -> list[Subject]:
    """The routes of an OpenAPI 3.1 description, by tag in the order of its tags; what has no tag is last, as `other`."""
    by_tag: dict[str, list[Operation]] = {}
    for path, methods in described["paths"].items():
        for method, one in methods.items():
            by_tag.setdefault(next(iter(one.get("tags", ())), "other"), []).append(_operation(method.upper(), path, one))
    texts = {tag["name"]: tag.get("description", "") for tag in described.get("tags", ())}
    names = [*(name for name in texts if name in by_tag), *(name for name in by_tag if name not in texts)]
    return [Subject(name, texts.get(name, ""), tuple(by_tag[name])) for name in names]


def models(described: Mapping[str, Any]) -> list[DescribedBody]:
    """All bodies, by name."""
    schemas = described.get("components", {}).get("schemas", {})
    return [
        DescribedBody(name, _prose(one.get("description", "")), tuple(_members(one)))
        for name, one in sorted(schemas.items())
    ]


def type_of(schema: Mapping[str, Any]) -> tuple[Phrase, ...]:
    """A JSON schema's type in words: `list of text`, `whole number or null`."""
    return tuple(_type(schema))


def _operation(method: str, path: str, one: Mapping[str, Any]) -> Operation:
    fields = tuple(_parameter(parameter) for parameter in one.get("parameters", ()))
    media, schema = _content(one.get("requestBody", {}))
    scope = one.get("x-scope")
    return Operation(
        method,
        path,
        re.sub(r"[^a-z0-9]+", "-", f"{method}-{path}".lower()).strip("-"),
        one.get("summary", ""),
        _prose(one.get("description", "")),
        scope,
        fields,
        type_of(schema) if media else (),
        media,
        tuple(_answers(one.get("responses", {}))),
        _curl(method, path, media, scope),
    )


def _answers(responses: Mapping[str, Any]) -> Iterator[RouteAnswer]:
    """By status, without problems, which every route may return."""
    for status, answer in sorted(responses.items()):
        media, schema = _content(answer)
        if "problem" in media:
            continue
        text = answer.get("description", "")
        yield RouteAnswer(
            status, media, type_of(schema) if schema else (), "" if text == "Successful Response" else _prose(text)
        )


def _content(holder: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    content = holder.get("content", {})
    first: Mapping[str, Any] = next(iter(content.values()), {})
    return ", ".join(content), first.get("schema", {})


def _parameter(one: Mapping[str, Any]) -> Field:
    schema = one.get("schema", {})
    return _field(one["name"], one["in"], schema, one.get("required", False), one.get("description"))


def _members(schema: Mapping[str, Any]) -> Iterator[Field]:
    required = schema.get("required", ())
    for name, one in schema.get("properties", {}).items():
        yield _field(name, "", one, name in required, None)


def _field(name: str, place: str, schema: Mapping[str, Any], required: bool, description: str | None) -> Field:
    default = json.dumps(schema["default"]) if schema.get("default") is not None else None
    text = schema.get("description", "") if description is None else description
    return Field(name, place, type_of(schema), _limits(schema), required, default, _prose(text))


def _limits(schema: Mapping[str, Any]) -> str:
    kinds = [schema, *schema.get("anyOf", ())]
    found = [(words, kind[key]) for kind in kinds for key, words in _LIMITS.items() if key in kind]
    return ", ".join(words.format(_limit(value)) for words, value in found)


def _limit(value: Any) -> Any:
    """A number as text; 64-bit limits as a power of two."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and value > _COUNTED_MAX:
        for more, words in ((0, "2^{}"), (1, "2^{} - 1")):
            if (value + more) & (value + more - 1) == 0:
                return words.format((value + more).bit_length() - 1)
    return value


def _type(schema: Mapping[str, Any]) -> Iterator[Phrase]:
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        yield Phrase(name, name)
    elif "enum" in schema or "const" in schema:
        yield Phrase(" | ".join(json.dumps(value) for value in schema.get("enum", [schema.get("const")])))
    elif choices := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
        for number, choice in enumerate(choices):
            if number:
                yield Phrase(" or ")
            yield from _type(choice)
    elif schema.get("type") == "array":
        yield Phrase("list of ")
        yield from _items(schema)
    elif schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        yield Phrase("object of ")
        yield from _type(schema["additionalProperties"])
    elif schema.get("format") == "binary" or schema.get("contentMediaType"):
        yield Phrase("bytes")
    else:
        yield Phrase(_WORDS.get(str(schema.get("type")), str(schema.get("type", "anything"))))


def _items(schema: Mapping[str, Any]) -> Iterator[Phrase]:
    fixed = schema.get("prefixItems")
    if not fixed:
        yield from _type(schema.get("items", {}))
        return
    for number, one in enumerate(fixed):
        if number:
            yield Phrase(", ")
        yield from _type(one)


def _curl(method: str, path: str, media: str, scope: str | None) -> str:
    """A command to try it: `$URL` and `$TOKEN` are the reader's."""
    words = ["curl", *([] if method == "GET" else ["-X", method])]
    words += [] if scope is None else ['-H "Authorization: Bearer $TOKEN"']
    words += [f"-H 'Content-Type: {media}'", "--data @body"] if media else []
    return " ".join([*words, f'"$URL{path}"'])


def _prose(text: str) -> str:
    return " ".join(text.split())
