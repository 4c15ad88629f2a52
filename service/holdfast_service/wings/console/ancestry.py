"""The ancestry of a merged checkpoint, through all generations, as far as the viewer may read it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml

from holdfast_formats import naming
from holdfast_formats.digest import digest
from holdfast_formats.disk import state_json
from holdfast_formats.errors import CheckpointError, NoSuchRun
from holdfast_service.wings.console.viewer_api import ViewerApi, at, to

GENERATIONS_MAX = 4
SOURCES_MAX = 64
STATE_BYTES_MAX = 2**22
_TEXT_MAX = 60


class Ancestor(NamedTuple):
    """A source of a merge. `name` is empty for one that the viewer may not read; `how` describes its own merge."""

    name: str
    page: str
    weight: str
    note: str
    how: str = ""
    sources: tuple[Ancestor, ...] = ()


class Ancestry(NamedTuple):
    how: str
    sources: tuple[Ancestor, ...]


async def ancestry_of(api: ViewerApi, run: str, step: int, generation: int = 0) -> Ancestry | None:
    """The ancestry of a checkpoint; None for one that was not merged."""
    origin = await _origin(api, run, step)
    if origin is None or origin.get("kind") != "merge":
        return None
    models = [one for one in origin.get("models", ()) if isinstance(one, dict)][:SOURCES_MAX]
    weights = _weights(origin)
    ancestors = await asyncio.gather(*(_ancestor(api, one, weights, generation) for one in models))
    how = f"{origin.get('method')}, {origin.get('dialect')} dialect, seed {origin.get('seed')}"
    return Ancestry(how, tuple(ancestors))


async def _origin(api: ViewerApi, run: str, step: int) -> Mapping[str, Any] | None:
    path = at(run, step, "files", naming.STATE)
    head = await api.request("HEAD", path)
    if int(head.headers.get("content-length", STATE_BYTES_MAX)) >= STATE_BYTES_MAX:
        return None
    return state_json.source_of((await api.request("GET", path)).content)


async def _ancestor(api: ViewerApi, model: Mapping[str, Any], weights: Mapping[str, str], generation: int) -> Ancestor:
    name = str(model.get("model"))
    run, step = model.get("run"), model.get("step")
    weight = weights.get(name, "")
    if not isinstance(run, str) or not isinstance(step, int):
        return Ancestor(name, "", weight, f"a directory, {model.get('kind')}")
    page = to(run, step)
    try:
        commit = (await api.request("GET", at(run, step, "files", naming.COMMIT))).content
        if digest(commit) != model.get("commit"):
            return Ancestor(name, page, weight, "replaced since by another checkpoint")
        inner = await ancestry_of(api, run, step, generation + 1) if generation + 1 < GENERATIONS_MAX else None
    except NoSuchRun:
        return Ancestor("", "", weight, "a checkpoint of a run that was deleted or that your token cannot read")
    except CheckpointError as error:
        return Ancestor(name, "", weight, error.detail)
    return Ancestor(name, page, weight, "", *(() if inner is None else inner))


def _weights(origin: Mapping[str, Any]) -> dict[str, str]:
    """The weight of each model, and that of what comes with an adapter, as the recipe has it."""
    try:
        recipe = yaml.safe_load(str(origin.get("recipe", "")))
        shared = _weight(recipe)
        weights = {}
        for one in recipe["models"]:
            weight = _weight(one) or shared
            for part in str(one["model"]).split("+"):
                weights[part] = weight
        return weights
    except (yaml.YAMLError, RecursionError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _weight(given: Mapping[str, Any]) -> str:
    weight = (given.get("parameters") or {}).get("weight")
    if isinstance(weight, int | float):
        return f"{weight:g}"
    if isinstance(weight, list) and len(weight) < _TEXT_MAX and all(isinstance(one, int | float) for one in weight):
        return ", ".join(f"{one:g}" for one in weight)
    return "" if weight is None else "by tensor"
