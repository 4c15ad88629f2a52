"""The packaged programs, and the choice of one for a model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.resources import files
from typing import Any

from holdfast_formats.errors import InvalidRequest, LimitExceeded, StateMismatch
from holdfast_formats.mapping.listing import TensorKey
from holdfast_formats.programs.compilation import compile_program
from holdfast_formats.programs.document import Program, read_program
from holdfast_formats.programs.inversion import inverted
from holdfast_formats.tensors import TensorSpec

AUTO = "auto"  # the program that makes the live tensors of a checkpoint's
_INVERSE, _WEIGHTS = "-inverse", "model"
_EXPERTS = "hf-stacked"  # programs for experts, the ones most often needed


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
    if name == AUTO:
        raise InvalidRequest(
            f"{AUTO!r} chooses a program by the tensors of a live state, which are unknown here",
            hint=f"restore with layout=ParallelLayout(…, program={AUTO!r}), or use one of {', '.join(packaged())}",
        )
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


def fitting(
    specs: Mapping[TensorKey, TensorSpec], wanted: Collection[str], config: Mapping[str, Any] | None
) -> Program | None:
    """The program, or the inverse of one, that makes all `wanted` weights of a checkpoint with these tensors; None if none
    does.

    Only programs for config.json's model type are tried; without a known one, those that need no sizes.
    """
    weights = {key: spec for key, spec in specs.items() if key.group == _WEIGHTS}
    known = {kind for name in packaged() for kind in load(name).model_types}
    kinds = known.intersection(_model_types(config or {}))
    for name in sorted(packaged(), key=lambda name: not name.startswith(_EXPERTS)):
        program = load(name)
        if kinds.intersection(program.model_types) or not (kinds or program.sizes):
            for way in _ways(program):
                if _makes(way, weights, wanted, config or {}):
                    return way
    return None


def _ways(program: Program) -> Iterator[Program]:
    yield program
    with suppress(InvalidRequest):
        yield inverted(program)


def _makes(
    program: Program, weights: Mapping[TensorKey, TensorSpec], wanted: Collection[str], config: Mapping[str, Any]
) -> bool:
    try:
        made = {key.name for key in compile_program(program, weights, config).tensors}
    except (InvalidRequest, LimitExceeded, StateMismatch):
        return False
    return made.issuperset(wanted)


def _model_type(config: Mapping[str, Any]) -> str:
    known, kinds = {kind for name in packaged() for kind in load(name).model_types}, _model_types(config)
    if not kinds:
        raise InvalidRequest("config.json has no model_type", hint="name the program instead")
    return next((kind for kind in kinds if kind in known), kinds[0])


def _model_types(config: Mapping[str, Any]) -> list[str]:
    """The model types of a config.json and of its part for text."""
    nested = config.get("text_config")
    named = [config.get("model_type"), nested.get("model_type") if isinstance(nested, Mapping) else None]
    return [kind for kind in named if isinstance(kind, str)]
