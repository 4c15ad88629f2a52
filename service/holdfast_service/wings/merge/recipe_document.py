"""A recipe's YAML as values with line numbers, so that errors have key and line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import yaml

from holdfast_formats.errors import InvalidRequest, LimitExceeded
from holdfast_formats.near_names import did_you_mean

TEXT_BYTES_MAX = 2**15  # a job's request holds it
NODES_MAX = 10_000
DEPTH_MAX = 12

_SEVERAL = "expected a single document in the stream"
_EXAMPLES = "write `merge_method` and `models`; docs/merging.md has examples"
_YAML = "indent with spaces, and put text that has `: ` or ` #` in it in quotes"

Scalar = str | int | float | bool | None


class Located:
    """A value of a document, its key or position, and its line, from 1 on."""

    def __init__(self, value: Scalar | list[Located] | dict[str, Located], at: str, line: int) -> None:
        self.value, self.at, self.line = value, at, line

    def refuse(self, what: str, hint: str) -> NoReturn:
        """`InvalidRequest` with the position first."""
        raise InvalidRequest(f"recipe, line {self.line}: {self.at} {what}", hint=hint, line=self.line, key=self.at)

    def mapping(self, known: Iterable[str] | None = None) -> dict[str, Located]:
        if not isinstance(self.value, dict):
            self.refuse("is not a mapping of keys to values", "write lines `KEY: VALUE` below it")
        if known is not None:
            names = sorted(known)
            for key, inner in self.value.items():
                if key not in names:
                    raise InvalidRequest(
                        f"recipe, line {inner.line}: unknown key {key!r} in {self.at}",
                        hint=did_you_mean(key, names, f"known keys: {', '.join(names)}"),
                        line=inner.line,
                        key=key,
                    )
        return self.value

    def items(self) -> list[Located]:
        if not isinstance(self.value, list):
            self.refuse("is not a list", "write `[A, B]`, or lines that begin with `- `")
        return self.value

    def text(self) -> str:
        if not isinstance(self.value, str) or not self.value:
            self.refuse(f"is {self.value!r} instead of text", "write text, in quotes if YAML reads it as something else")
        return self.value


def read_document(text: str) -> Located:
    """A recipe's document. `InvalidRequest` with the line for invalid YAML, `LimitExceeded` for one that is too large."""
    if len(text.encode(errors="surrogatepass")) > TEXT_BYTES_MAX:
        raise LimitExceeded(
            f"a recipe has at most {TEXT_BYTES_MAX} bytes",
            hint="delete comments and values that are defaults, or merge some of the models first",
        )
    try:
        _check_depth(text)
        document = yaml.compose(text, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        if error.context == _SEVERAL:
            hint = "make a recipe of each document, and merge them one after the other"
            raise InvalidRequest(f"recipe, line {line}: a second document begins", hint=hint, line=line) from None
        raise InvalidRequest(f"recipe, line {line}: {error.problem or 'no YAML'}", hint=_YAML, line=line) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise InvalidRequest(f"the recipe is not YAML: {error}", hint=_YAML) from None
    if document is None:
        raise InvalidRequest("the recipe is empty", hint=_EXAMPLES)
    return _Reader().read(document, "the recipe", 0)


def _check_depth(text: str) -> None:
    """`LimitExceeded` for values nested too deeply, during parsing: building them would take seconds."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEPTH_MAX:
            raise _too_much(event.start_mark.line + 1 if event.start_mark is not None else 1)


def _too_much(line: int) -> LimitExceeded:
    return LimitExceeded(
        f"recipe, line {line}: too many values, or too deep",
        hint=f"a recipe has at most {NODES_MAX} values, nested at most {DEPTH_MAX} deep",
    )


class _Reader:
    """Turns nodes into values; an alias counts as often as it is used."""

    def __init__(self) -> None:
        self._nodes = 0

    def read(self, node: yaml.Node, at: str, depth: int) -> Located:
        line = node.start_mark.line + 1
        self._nodes += 1
        if self._nodes > NODES_MAX or depth > DEPTH_MAX:
            raise _too_much(line)
        if isinstance(node, yaml.SequenceNode):
            return Located([self.read(one, f"{at}[{i}]", depth + 1) for i, one in enumerate(node.value)], at, line)
        if isinstance(node, yaml.MappingNode):
            return Located(self._mapping(node, depth), at, line)
        return Located(_scalar(node, at, line), at, line)

    def _mapping(self, node: yaml.MappingNode, depth: int) -> dict[str, Located]:
        mapping: dict[str, Located] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise InvalidRequest(
                    f"recipe, line {line}: a key that is not text",
                    hint="write each key as a word, such as `models:`",
                    line=line,
                )
            name = str(key.value)
            if name in mapping:
                raise InvalidRequest(
                    f"recipe, line {line}: {name!r} appears twice", hint="keep one of them", line=line, key=name
                )
            mapping[name] = Located(self.read(value, name, depth + 1).value, name, line)
        return mapping


def _scalar(node: yaml.Node, at: str, line: int) -> Scalar:
    """A value of YAML's safe types; anything else is refused."""
    kind = str(node.tag).removeprefix("tag:yaml.org,2002:")
    if kind in ("str", "int", "float", "bool", "null"):
        try:
            loader = yaml.SafeLoader("")
            scalar: Scalar = loader.construct_object(node)
            return scalar
        except (yaml.YAMLError, ValueError, KeyError) as error:
            raise InvalidRequest(
                f"recipe, line {line}: {at} cannot be read: {error}",
                hint="put it in quotes if it is text",
                line=line,
                key=at,
            ) from None
    raise InvalidRequest(
        f"recipe, line {line}: {at} is of the type {node.tag!r}, which a recipe cannot have",
        hint="write it as text, a number, true, false or null, without a tag",
        line=line,
        key=at,
    )
