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

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, get_args

from holdfast_formats.errors import CheckpointError, InvalidRequest
from holdfast_formats.naming import check_group
from holdfast_formats.near_names import did_you_mean
from holdfast_service.wings.merge.methods import METHODS, PEFT_METHODS, MergedName, MergeParameter, Method, Value
from holdfast_service.wings.merge.recipe_document import Located, read_document
from holdfast_service.wings.merge.recipe_models import ModelName, RecipeSlice, SliceReader, read_name, read_settings
from holdfast_service.wings.merge.scanning import Terms
from holdfast_service.wings.merge.settings import Settings
from holdfast_service.wings.merge.task_vectors import Dialect
from holdfast_service.wings.merge.vocabulary import RecipeTokenizer, read_template, read_tokenizer

SEED_MAX = 2**63 - 1
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
PARTS = ("models", "slices", "modules")
KEYS = (
    *("merge_method", *PARTS, "base_model", "parameters", "dtype", "out_dtype"),
    *("tokenizer_source", "tokenizer", "chat_template", "seed", "dialect", "group", "out_group", "name"),
)
GROUP = "model"
# Keys of mergekit's, and of its other programs, that are refused by name, and what to do instead.
NOT_SUPPORTED = {
    "random_seed": "write `seed` instead",
    "experts": "Holdfast makes no mixture of experts of dense models: use mergekit-moe, and import its result",
}


class MergeRecipe(NamedTuple):
    """A parsed recipe: the parts of the result, in order of their layers."""

    method: Method
    slices: tuple[RecipeSlice, ...]
    base: ModelName | None
    dtype: str | None
    seed: int
    dialect: Dialect
    text: str
    group: str = GROUP  # the group of the merged tensors
    out_group: str = GROUP
    tokenizer: RecipeTokenizer | None = None  # None: the base's, and no row is moved
    chat_template: str | None = None  # its text, or auto

    @property
    def assets_of(self) -> ModelName:
        """The model whose configuration and tokenizer the result gets."""
        return self.slices[0].models[0].name if self.base is None else self.base

    @property
    def inputs(self) -> list[ModelName]:
        """Every input model once, in the order of formulas."""
        named: dict[str, ModelName] = {}
        for part in self.slices:
            for one in part.inputs:
                named.setdefault(str(one.name), one.name)
        return list(named.values())

    def terms(self, tensor: str, depth: float, part: int = 0, sources: Sequence[str] = ()) -> Terms:
        """The computation for a tensor of a part, whose inputs have the names `sources` if those differ.

        `InvalidRequest` for a missing parameter.
        """
        return self.method.terms(MergedName(tensor, self.seed, self.dialect), *self.values(tensor, depth, part, sources))

    def values(
        self, tensor: str, depth: float, part: int = 0, sources: Sequence[str] = ()
    ) -> tuple[Mapping[str, Value], list[Mapping[str, Value]]]:
        """The parameters for a tensor: shared ones, and those of each model."""
        of = self.slices[part]
        names = sources or [tensor] * len(of.models)
        shared = {one.name: self._value(one, of.settings, tensor, depth) for one in self._parameters(False)}
        models: list[Mapping[str, Value]] = [
            {one.name: self._value(one, (model.settings, *of.settings), name, depth) for one in self._parameters(True)}
            for model, name in zip(of.models, names, strict=False)
        ]
        return shared, models

    def unused_filters(self, tensors: Sequence[str]) -> list[str]:
        settings = {
            id(one): one for part in self.slices for one in (*part.settings, *(model.settings for model in part.models))
        }
        found = (word for one in settings.values() for setting in one.values() for word in setting.unused(tensors))
        return sorted(set(found))

    def _parameters(self, of_model: bool) -> Iterable[MergeParameter]:
        return (one for one in self.method.parameters if one.of_model == of_model)

    def _value(self, parameter: MergeParameter, places: tuple[Settings, ...], tensor: str, depth: float) -> Value:
        name = parameter.name
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
    of_adapters = "dialect" in keys and keys["dialect"].value == "peft"
    method = _method(_needed(document, keys, "merge_method"), PEFT_METHODS if of_adapters else METHODS)
    dialect = _dialect(keys.get("dialect"), method)
    base = read_name(keys["base_model"]) if "base_model" in keys else None
    settings = read_settings(keys["parameters"], method, True) if "parameters" in keys else {}
    slices = _parts(document, keys, SliceReader(method, base, (settings,)))
    dtype = _dtype(keys.get("dtype"))
    group = _group(keys.get("group"), GROUP)
    return MergeRecipe(
        method, slices, base, _dtype(keys.get("out_dtype")) or dtype, _seed(keys.get("seed")), dialect, text
    )._replace(
        group=group,
        out_group=_group(keys.get("out_group"), group),
        tokenizer=read_tokenizer(keys),
        chat_template=read_template(keys.get("chat_template")),
    )


def _parts(document: Located, keys: Mapping[str, Located], reader: SliceReader) -> tuple[RecipeSlice, ...]:
    """What is merged: exactly one of `models`, `slices`, and `modules` with one module."""
    named = [key for key in PARTS if key in keys]
    if len(named) > 1:
        keys[named[1]].refuse(f"is given besides {named[0]!r}", f"keep one of {', '.join(PARTS)}")
    given = keys[named[0]] if named else _needed(document, keys, "models")
    if not named or named[0] == "models":
        return reader.whole(given)
    if named[0] == "slices":
        return reader.slices(given)
    modules = list(given.mapping().values())
    if len(modules) != 1:
        given.refuse(f"has {len(modules)} modules", "list whole models under `models`: all their modules are merged")
    inner = modules[0].mapping((*PARTS[:2], "parameters"))
    if "parameters" in inner:
        reader = reader._replace(settings=(read_settings(inner["parameters"], reader.method, True), *reader.settings))
    return _parts(modules[0], inner, reader)


def _needed(document: Located, keys: Mapping[str, Located], name: str) -> Located:
    if name not in keys:
        raise InvalidRequest(f"the recipe has no {name}", hint=did_you_mean(name, keys, "see docs/merging.md for examples"))
    return keys[name]


def _method(given: Located, methods: Mapping[str, Method]) -> Method:
    name = given.text()
    if name.removesuffix("_svd") in PEFT_METHODS and name != "svd" and name.endswith("_svd"):
        way = f"write `{name.removesuffix('_svd')}`, which prunes A and B, or `svd`, which prunes nothing"
        given.refuse(f"is {name!r}, which prunes whole products and factorises them", way)
    if name in PEFT_METHODS and name not in methods:
        given.refuse(f"is {name!r}, which combines adapters", "write `dialect: peft` and `group: adapter`")
    if name not in methods:
        given.refuse(f"is {name!r}, which is not a method", did_you_mean(name, methods, f"one of {', '.join(methods)}"))
    return methods[name]


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
        given.refuse(f"is {given.value!r}, which is not a name of a group: {error.detail}", error.hint)


def _seed(given: Located | None) -> int:
    if given is None:
        return 0
    if isinstance(given.value, bool) or not isinstance(given.value, int) or not 0 <= given.value <= SEED_MAX:
        given.refuse(f"is {given.value!r} instead of a whole number of at least 0", "for example `0`, or delete the line")
    return given.value
