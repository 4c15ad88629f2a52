"""The parts of a result: whole models, or layers that are stacked under numbers of their own.

As in mergekit, tensors before the layers come from the first part, and those behind them from the last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.mapping.listing import ForeignTensor
from holdfast_service.wings.merge.recipe import MergeRecipe
from holdfast_service.wings.merge.recipe_models import RecipeModel
from holdfast_service.wings.merge.settings import depths, layer_of

# Tensors of no layer that are used before the first one: embeddings of tokens and positions, and what is done with them.
_BEFORE = re.compile(r"embed(?!_out)|embd\.|\.?wte\.|\.?wpe\.|^shared\.|rotary|inv_freq|relative_pe")

_HEAD = "lm_head.weight"
_EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight", "model.language_model.embed_tokens.weight")


class Model(NamedTuple):
    """A model that is merged: its weights by name, the dtypes to store them in, and new settings of its config.json."""

    name: str
    tensors: Mapping[str, ForeignTensor]
    stored: Mapping[str, str]
    settings: Mapping[str, Any] = {}


class StackedPart(NamedTuple):
    """Tensors that are merged with each other, by their names in the result, of each model in the order of formulas."""

    models: Sequence[Model]
    depths: Mapping[str, float]  # from 0 to 1
    sources: Mapping[str, tuple[str, ...]]  # each tensor's names in the models


def is_before_layers(name: str) -> bool:
    """Whether a tensor of no layer is used before the first one."""
    return _BEFORE.search(name) is not None


def parts(recipe: MergeRecipe, models: Mapping[str, Model]) -> Iterator[StackedPart]:
    """The parts of the result, as many as the recipe's, of models by their names.

    Raises `InvalidRequest` by line for layers that a model does not have; `StateMismatch` for models with several stacks.
    """
    last, first = len(recipe.slices) - 1, 0
    for number, part in enumerate(recipe.slices):
        named = [models[str(one.name)] for one in part.inputs]
        if part.layers is None:
            names = named[0].tensors.keys() | {name for model in named for name in model.tensors}
            yield StackedPart(named, depths(names), {})
            continue
        views = [
            _view(model, one, first, before=number == 0, behind=number == last)
            for model, one in zip(named, part.inputs, strict=True)
        ]
        yield _joined(named, views, first, part.layers)
        first += part.layers


def _joined(models: Sequence[Model], views: Sequence[Mapping[str, str]], first: int, layers: int) -> StackedPart:
    """A part of models' tensors: `views` has their names there by those in the result."""
    stacked = [
        Model(
            model.name,
            {made: model.tensors[name] for made, name in view.items()},
            {made: model.stored[name] for made, name in view.items()},
        )
        for model, view in zip(models, views, strict=True)
    ]
    depth = {}
    for made in views[0]:
        found = layer_of(made)
        depth[made] = 0.0 if found is None else (found.number - first) / (layers - 1) if layers > 1 else 1.0
    return StackedPart(stacked, depth, {made: tuple(view.get(made, made) for view in views) for made in views[0]})


def _view(model: Model, of: RecipeModel, first: int, before: bool, behind: bool) -> dict[str, str]:
    """The names in a model of the tensors that a part takes, by their names in the result."""
    assert of.layers is not None
    _check_layers(model, of)
    names = {}
    for name in model.tensors:
        found = layer_of(name)
        if found is None:
            if before if is_before_layers(name) else behind:
                names[name] = name
        elif found.number in of.layers:
            names[found.renumbered(first + found.number - of.layers.start)] = name
    return names


def _check_layers(model: Model, of: RecipeModel) -> None:
    assert of.layers is not None
    numbers: dict[str, int] = {}
    for found in filter(None, map(layer_of, model.tensors)):
        numbers[found.stack] = max(numbers.get(found.stack, 0), found.number + 1)
    if len(numbers) != 1:
        stacks = ", ".join(sorted(numbers)) or "none"
        raise StateMismatch(
            f"{model.name} has {len(numbers)} stacks of layers ({stacks}), and `slices` need exactly one",
            hint="list whole models under `models`",
        )
    count = next(iter(numbers.values()))
    if of.layers.stop > count:
        line = of.name.line
        raise InvalidRequest(
            f"recipe, line {line}: layer_range [{of.layers.start}, {of.layers.stop}] ends behind the {count} layers of "
            f"{model.name}",
            hint=f"end it at {count} at most",
            line=line,
            key="layer_range",
        )


def stacked_layers(recipe: MergeRecipe) -> list[int] | None:
    """The number of each layer of the result in the first model of its part; None if the recipe merges whole models."""
    ranges: Iterable[range | None] = [part.models[0].layers for part in recipe.slices]
    return [number for one in ranges if one is not None for number in one] or None


def with_heads(models: Mapping[str, Model]) -> dict[str, Model]:
    """The models, each with a head if one has it: the head of a model without one is its embedding."""
    if not any(_HEAD in model.tensors for model in models.values()):
        return dict(models)
    return {name: model if _HEAD in model.tensors else _with_head(model) for name, model in models.items()}


def _with_head(model: Model) -> Model:
    name = next((one for one in _EMBEDDINGS if one in model.tensors), None)
    if name is None:
        return model
    tensors, stored = {**model.tensors, _HEAD: model.tensors[name]}, {**model.stored, _HEAD: model.stored[name]}
    return model._replace(tensors=tensors, stored=stored)
