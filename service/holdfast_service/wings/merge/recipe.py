"""Recipes of merges: mergekit's YAML, with keys of our own for seed and dialect. docs/merging.md explains them.

merge_method: ties
base_model: llama3-8b@0
models:
  - model: llama3-8b@500
    parameters: {weight: 1.0, density: 0.5}
  - model: other@900
    parameters: {weight: 0.5, density: 0.5}
parameters: {normalize: true}
dtype: bfloat16
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, get_args

from holdfast_formats.errors import CheckpointError, InvalidRequest
from holdfast_formats.naming import check_group
from holdfast_formats.near_names import did_you_mean
from holdfast_service.wings.merge.methods import METHODS, MergedName, MergeParameter, Method, Value
from holdfast_service.wings.merge.recipe_document import Located, read_document
from holdfast_service.wings.merge.scanning import Terms
from holdfast_service.wings.merge.settings import Setting, Settings, read_setting
from holdfast_service.wings.merge.task_vectors import Dialect

MODELS_MAX = 64
SEED_MAX = 2**63 - 1
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
KEYS = ("merge_method", "models", "base_model", "parameters", "dtype", "out_dtype", "seed", "dialect", "group", "out_group")
GROUP = "model"
# Keys of mergekit's that are refused by name, and what to do instead.
NOT_SUPPORTED = {
    "slices": "list whole models under `models`; use filters and gradients for single layers",
    "modules": "list whole models under `models`",
    "tokenizer_source": "tokenizer and configuration come from the base; merge models with one tokenizer",
    "tokenizer": "tokenizer and configuration come from the base; merge models with one tokenizer",
    "chat_template": "it comes from the base; edit the file in an export of the result",
}
_OF_MERGEKIT = ("arcee_fusion", "karcher", "model_stock", "multislerp", "nearswap", "nuslerp", "ram", "ramplus_tl", "sce")


class ModelName(NamedTuple):
    """A model of a recipe: a checkpoint (RUN@STEP) or a directory, with an optional adapter."""

    model: str
    adapter: str | None
    line: int

    def __str__(self) -> str:
        return self.model if self.adapter is None else f"{self.model}+{self.adapter}"

    def same(self, other: ModelName) -> bool:
        return (self.model, self.adapter) == (other.model, other.adapter)


class RecipeModel(NamedTuple):
    """A model that is merged, and its own values of parameters."""

    name: ModelName
    settings: Settings


class MergeRecipe(NamedTuple):
    """A parsed recipe. `models` are without the base, unless the method does not use one."""

    method: Method
    models: tuple[RecipeModel, ...]
    base: ModelName | None
    settings: Settings
    dtype: str | None
    seed: int
    dialect: Dialect
    text: str
    group: str = GROUP  # the group of the merged tensors
    out_group: str = GROUP

    @property
    def assets_of(self) -> ModelName:
        """The model whose configuration and tokenizer the result gets."""
        return self.models[0].name if self.base is None else self.base

    @property
    def inputs(self) -> list[ModelName]:
        """The input models, in the order of formulas."""
        named = [one.name for one in self.models]
        return [*named, self.base] if self.base is not None and self.method.needs_base else named

    def terms(self, tensor: str, depth: float) -> Terms:
        """The computation for a tensor; `InvalidRequest` for a missing parameter."""
        shared = {one.name: self._value(one.name, (self.settings,), tensor, depth) for one in self._parameters(False)}
        models = [
            {
                one.name: self._value(one.name, (model.settings, self.settings), tensor, depth)
                for one in self._parameters(True)
            }
            for model in self.models
        ]
        return self.method.terms(MergedName(tensor, self.seed, self.dialect), shared, models)

    def unused_filters(self, tensors: Sequence[str]) -> list[str]:
        settings = [self.settings, *(model.settings for model in self.models)]
        return sorted({word for one in settings for setting in one.values() for word in setting.unused(tensors)})

    def _parameters(self, of_model: bool) -> Iterable[MergeParameter]:
        return (one for one in self.method.parameters if one.of_model == of_model)

    def _value(self, name: str, places: tuple[Settings, ...], tensor: str, depth: float) -> Value:
        parameter = self.method.parameter(name)
        assert parameter is not None
        for settings in places:
            value = settings[name].value(tensor, depth) if name in settings else None
            if value is not None:
                return value
        if parameter.default is None:
            raise InvalidRequest(
                f"the recipe gives tensor {tensor!r} no {name}",
                hint=f"{self.method.name} needs `{name}` under `parameters`, for all models or for each",
                tensor=tensor,
                key=name,
            )
        return parameter.default


def read_recipe(text: str) -> MergeRecipe:
    """Read a recipe. `InvalidRequest` with key and line for unknown or invalid contents; `LimitExceeded`."""
    document = read_document(text)
    keys = document.mapping()
    for key in keys:
        if key in NOT_SUPPORTED:
            keys[key].refuse("is a mergekit key that Holdfast does not support", NOT_SUPPORTED[key])
    document.mapping(KEYS)
    method = _method(_needed(document, keys, "merge_method"))
    dialect = _dialect(keys.get("dialect"), method)
    base = _model_name(keys["base_model"]) if "base_model" in keys else None
    models = [_model(one, method) for one in _needed(document, keys, "models").items()]
    settings = _settings(keys["parameters"], method, of_models=True) if "parameters" in keys else {}
    dtype = _dtype(keys.get("dtype"))
    group = _group(keys.get("group"), GROUP)
    recipe = MergeRecipe(
        method, tuple(models), base, settings, _dtype(keys.get("out_dtype")) or dtype, _seed(keys.get("seed")), dialect, text
    )._replace(group=group, out_group=_group(keys.get("out_group"), group))
    return _without_base(recipe, document, keys)


def _needed(document: Located, keys: dict[str, Located], name: str) -> Located:
    if name not in keys:
        raise InvalidRequest(f"the recipe has no {name}", hint=did_you_mean(name, keys, "see docs/merging.md for examples"))
    return keys[name]


def _without_base(recipe: MergeRecipe, document: Located, keys: dict[str, Located]) -> MergeRecipe:
    """Separate the base from the models; refused if their number is not the method's."""
    method, base = recipe.method, recipe.base
    at = keys["models"]
    for number, one in enumerate(recipe.models):
        if any(one.name.same(other.name) for other in recipe.models[:number]):
            raise InvalidRequest(f"recipe, line {one.name.line}: {one.name} lists a model twice", line=one.name.line)
    if method.needs_base:
        if base is None:
            raise InvalidRequest(f"the recipe has no base_model, which {method.name} needs", key="base_model")
        recipe = recipe._replace(models=tuple(one for one in recipe.models if not one.name.same(base)))
    elif base is not None and not any(one.name.same(base) for one in recipe.models):
        keys["base_model"].refuse(f"is not one of the models, as {method.name} requires", "list it under `models`")
    most = method.models_max or MODELS_MAX
    if not method.models_min <= len(recipe.models) <= most:
        besides = " besides the base" if method.needs_base else ""
        wanted = f"{method.models_min}" if method.models_min == most else f"{method.models_min} to {most}"
        at.refuse(f"has {len(recipe.models)} models{besides}; {method.name} takes {wanted}")
    return recipe


def _method(given: Located) -> Method:
    name = given.text()
    if name in _OF_MERGEKIT:
        given.refuse(f"is {name!r}, a mergekit method that Holdfast does not support", f"one of {', '.join(METHODS)}")
    if name not in METHODS:
        given.refuse(f"is {name!r}, which is not a method", did_you_mean(name, METHODS, f"one of {', '.join(METHODS)}"))
    return METHODS[name]


def _dialect(given: Located | None, method: Method) -> Dialect:
    if given is None:
        return "mergekit"
    if given.value not in get_args(Dialect):
        given.refuse(f"is {given.value!r}, which is not a known dialect", f"one of {', '.join(get_args(Dialect))}")
    if given.value not in method.dialects:
        given.refuse(f"is {given.value!r}, in which Holdfast cannot compute {method.name}", "leave the dialect out")
    return given.value


def _dtype(given: Located | None) -> str | None:
    if given is None or given.value is None:
        return None
    if given.value not in DTYPES:
        given.refuse(f"is {given.value!r}", f"one of {', '.join(DTYPES)}")
    return DTYPES[str(given.value)]


def _group(given: Located | None, otherwise: str) -> str:
    if given is None:
        return otherwise
    try:
        return check_group(given.text())
    except CheckpointError as error:
        given.refuse(f"is {given.value!r}, which is not a name of a group: {error.detail}")


def _seed(given: Located | None) -> int:
    if given is None:
        return 0
    if isinstance(given.value, bool) or not isinstance(given.value, int) or not 0 <= given.value <= SEED_MAX:
        given.refuse(f"is {given.value!r} instead of a whole number of at least 0")
    return given.value


def _model(given: Located, method: Method) -> RecipeModel:
    keys = given.mapping(("model", "parameters"))
    if "model" not in keys:
        given.refuse("names no model")
    settings = _settings(keys["parameters"], method, of_models=False) if "parameters" in keys else {}
    return RecipeModel(_model_name(keys["model"]), settings)


def _model_name(given: Located) -> ModelName:
    text = given.text()
    model, plus, adapter = text.partition("+")
    if not model or (plus and (not adapter or "+" in adapter)):
        given.refuse(f"is {text!r}", "give MODEL, or MODEL+ADAPTER")
    return ModelName(model, adapter or None, given.line)


def _settings(given: Located, method: Method, of_models: bool) -> dict[str, Setting]:
    """The settings of a model, or those at the top, which may have every parameter."""
    if given.value is None:
        return {}
    settings = {}
    known = [one.name for one in method.parameters if one.of_model or of_models]
    for name, inner in given.mapping().items():
        parameter = method.parameter(name)
        if parameter is None:
            inner.refuse(
                f"is not a parameter of {method.name}",
                did_you_mean(name, known, f"known parameters: {', '.join(known) or 'none'}"),
            )
        if not of_models and not parameter.of_model:
            inner.refuse("applies to all models together", "move it to `parameters` at the top")
        settings[name] = read_setting(inner, parameter)
    return settings
