"""The packaged programs, and the choice of one for a model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.programs.document import Program, read_program
from holdfast_formats.programs.inversion import inverted

_INVERSE = "-inverse"


@cache
def packaged() -> tuple[str, ...]:
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in _tables() if entry.name.endswith(".toml")))


def _tables() -> Any:
    return (files(__package__) / "tables").iterdir()


@cache
def load(name: str) -> Program:
    """A program by its name; the inverse of one by its name and `-inverse`. `InvalidRequest` if there is none."""
    if name.endswith(_INVERSE) and not name.removesuffix(_INVERSE).endswith(_INVERSE):
        return inverted(load(name.removesuffix(_INVERSE)))
    return read_program(written(name))


def named_or_written(given: str) -> Program:
    """A program by its text, which has a `=` in it, or by its name. Raises as `read_program` and `load`."""
    return read_program(given) if "=" in given else load(given.strip())


def written(name: str) -> str:
    """The text of a packaged program; `InvalidRequest` if there is none of this name."""
    if name not in packaged():
        raise InvalidRequest(
            f"there is no program {name!r}", hint=f"use one of {', '.join(packaged())}, or a program's file"
        )
    return (files(__package__) / "tables" / f"{name}.toml").read_text("utf-8")


def find(source: str, target: str, config: Mapping[str, Any]) -> Program:
    """The program from one layout of names to another for a model, by config.json's model type; derived, if need be.

    Raises `InvalidRequest` with the known layouts if no program is for this model.
    """
    kind = _model_type(config)
    programs = [load(name) for name in packaged()]
    for program in programs:
        if kind in program.model_types and (program.source, program.target) == (source, target):
            return program
    for program in programs:
        if kind in program.model_types and (program.source, program.target) == (target, source):
            return inverted(program)
    known = sorted({f"{p.source} and {p.target}" for p in programs if kind in p.model_types})
    raise InvalidRequest(
        f"no program converts {source} to {target} for the model type {kind!r}",
        hint=f"choose one of its programs: {', '.join(known)}" if known else "write one, as docs/programs.md describes",
    )


def _model_type(config: Mapping[str, Any]) -> str:
    nested = config.get("text_config")
    named_kinds = [config.get("model_type"), nested.get("model_type") if isinstance(nested, Mapping) else None]
    known = {kind for name in packaged() for kind in load(name).model_types}
    kinds = [kind for kind in named_kinds if isinstance(kind, str)]
    if not kinds:
        raise InvalidRequest("config.json has no model_type", hint="name the program instead")
    return next((kind for kind in kinds if kind in known), kinds[0])
