"""The shape of the product is looked at: every rule finds what breaks it, and the product breaks none."""

from __future__ import annotations

import ast

import pytest

from tests import structure
from tests.structure import Source


def source(path: str, text: str) -> Source:
    return Source(path, ast.parse(text), len(text.splitlines()))


def test_a_full_folder_is_named() -> None:
    """A package's own file counts, as it is read as well."""
    names = ["__init__", *(f"m{i}" for i in range(structure.MODULES_MAX))]
    modules = [source(f"client/holdfast/room/{name}.py", "") for name in names]
    assert structure.full_folders(modules) == ["client/holdfast/room has 26 modules"]
    assert structure.full_folders(modules[1:]) == []


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ("class Part: ...", "class Part: ...", ["class Part stands in a.py, b.py"]),
        ("class Part(Protocol): ...", "class Part: ...", []),
        ("class Part: ...", "class Piece: ...", []),
        ("class _Part: ...", "class _Part: ...", []),
    ],
)
def test_a_class_name_for_two_things_is_named(first: str, second: str, found: list[str]) -> None:
    """A protocol and what implements it are one thing, and a private name is nobody else's."""
    assert structure.homonyms([source("a.py", first), source("b.py", second)]) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def f(which: tuple[str, int]) -> None: ...", ["a.py:1: f(which: tuple[str, int])"]),
        ("def f(*, which: tuple[str, int] = ('', 0)) -> None: ...", ["a.py:1: f(which: tuple[str, int])"]),
        ("def f(shape: tuple[int, ...], box: tuple[int, int]) -> None: ...", []),
    ],
)
def test_a_tuple_of_unlike_things_is_named(text: str, found: list[str]) -> None:
    """Where it is a parameter; many of one kind are a sequence."""
    assert structure.tuple_parameters([source("a.py", text)]) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def f():\n    about = {'a': 1}\n    g(**about)", ["a.py:3: **about"]),
        ("def f(about):\n    g(**about)", []),
    ],
)
def test_keywords_that_a_dictionary_hides_are_named(text: str, found: list[str]) -> None:
    """What a caller gave may be passed on; what was written down here is written where it goes."""
    assert structure.hidden_keywords([source("a.py", text)]) == found


def test_a_long_function_is_named() -> None:
    """Its lines are counted from the first to the last."""
    body = "\n".join("    pass" for _ in range(structure.FUNCTION_LINES_MAX))
    assert structure.long_functions([source("a.py", f"def f():\n{body}")]) == ["a.py:1: f has 61 lines"]


def test_the_product_keeps_to_it() -> None:
    """As `make check` says."""
    assert structure.main() == 0
