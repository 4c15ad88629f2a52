"""TOML of strangers: values, errors that say where, and nothing that takes minutes."""

from __future__ import annotations

import pytest

from holdfast_formats import toml_text
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.layout.rules.document import decode
from holdfast_formats.programs.document import read_program

LONG = ".".join(["a"] * 20_000)


def test_values() -> None:
    """Whatever is usual: dotted keys, quoted parts, names with dots inside of texts."""
    text = 'a.b."c d" = 1\n[x.y]\nstatements = """\nmodel.layers.0.self_attn.q_proj.weight -> _\n"""\n'
    assert toml_text.decode(text.encode()) == {
        "a": {"b": {"c d": 1}},
        "x": {"y": {"statements": "model.layers.0.self_attn.q_proj.weight -> _\n"}},
    }


@pytest.mark.parametrize("text", [f"{LONG} = 1", f"[{LONG}]", f"x = {{{LONG} = 1}}", f"{LONG} = 1".replace(".", " . ")])
def test_keys_of_very_many_parts(text: str) -> None:
    """The parser would take 20 s for the first one, holding Python's lock."""
    with pytest.raises(ValueError, match="64 parts"):
        toml_text.decode(text.encode())
    for read in (decode, read_program):
        with pytest.raises(InvalidRequest, match="64 parts"):
            read(text)


@pytest.mark.parametrize("text", ["x = ", "x = 1\nx = 2", "x=" + "[" * 100_000, "\0"])
def test_what_is_no_toml(text: str) -> None:
    """One of the two errors that callers expect."""
    with pytest.raises((ValueError, RecursionError)):
        toml_text.decode(text.encode())
