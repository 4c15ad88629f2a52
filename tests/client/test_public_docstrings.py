"""`help()` and the reference are made of docstrings: every public name has one, with arguments, results and an example."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import pytest

import holdfast

DOCUMENTED = ("Checkpoint", "Checkpointer", "SaveTicket")  # of which each method is, too
OF_THE_PACKAGE = {"SaveTicket": {"await_promise", "end", "hear", "lacks", "mark_staged", "saved_before", "when_ended"}}
NAMES = sorted(set(holdfast.__all__) - {"__version__"})


def methods() -> Iterator[tuple[str, Any]]:
    for name in DOCUMENTED:
        for method, held in vars(getattr(holdfast, name)).items():
            if not method.startswith("_") and method not in OF_THE_PACKAGE.get(name, ()):
                yield f"{name}.{method}", held


def section(text: str, title: str) -> list[str]:
    """The names that begin the entries of a section; for one without entries its lines."""
    lines = iter(text.splitlines())
    if title + ":" not in (line for line in lines):
        return []
    inside: list[str] = []
    for line in lines:
        if line and not line.startswith("    "):
            break
        inside.append(line[4:])
    return [line.partition(":")[0].lstrip("*") for line in inside if line and not line.startswith(" ")]


def parameters(of: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(of).parameters if name not in ("self", "cls")]


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_described(name: str) -> None:
    """With an example; a class with the arguments of its constructor, or with the attributes of what it holds."""
    public = getattr(holdfast, name)
    text = inspect.getdoc(public) or ""
    assert ">>> " in "\n".join(section(text, "Example")), text
    if not inspect.isclass(public) or (issubclass(public, Warning) or name == "SaveTicket"):  # saves make tickets
        return
    fields = getattr(public, "_fields", None) or getattr(public, "__dataclass_fields__", None)
    assert section(text, "Attributes" if fields else "Args") == list(fields or parameters(public)), text


@pytest.mark.parametrize(("name", "held"), list(methods()))
def test_a_public_method_is_described(name: str, held: Any) -> None:
    """With every argument, what it returns, and an example; a property with what it is."""
    text = inspect.getdoc(held) or ""
    assert text.partition("\n")[0].endswith("."), name
    if isinstance(held, property | cached_property):
        return
    function = getattr(held, "__func__", held)
    assert section(text, "Args") == parameters(function), name
    assert bool(section(text, "Returns")) == (inspect.signature(function).return_annotation != "None"), name
    assert ">>> " in "\n".join(section(text, "Example")), name
