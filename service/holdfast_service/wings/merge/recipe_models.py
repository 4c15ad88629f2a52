"""The models of a recipe: whole ones under `models`, or ranges of their layers under `slices`.

slices:
  - sources:
      - {model: llama3-8b@0, layer_range: [0, 24]}
  - sources:
      - {model: other@900, layer_range: [16, 32], parameters: {scale: 0.5}}
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.near_names import did_you_mean
from holdfast_service.wings.merge.methods import Method
from holdfast_service.wings.merge.recipe_document import Located
from holdfast_service.wings.merge.settings import Setting, Settings, read_setting

MODELS_MAX, LAYERS_MAX = 64, 10_000
_OF_SOURCES = ("model", "layer_range", "parameters")


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
    """A model that is merged, and its own values of parameters; `layers` of a slice, or None for the whole model."""

    name: ModelName
    settings: Settings
    layers: range | None = None


class RecipeSlice(NamedTuple):
    """A part of the result: the models that are merged into it, without the base, and the base if the method uses it.

    `settings` are the values for all its models, the nearest first.
    """

    models: tuple[RecipeModel, ...]
    base: RecipeModel | None
    settings: tuple[Settings, ...]
    line: int

    @property
    def inputs(self) -> tuple[RecipeModel, ...]:
        """The input models, in the order of formulas."""
        return self.models if self.base is None else (*self.models, self.base)

    @property
    def layers(self) -> int | None:
        """The number of the result's layers that it makes; None for those of whole models."""
        layers = self.models[0].layers
        return None if layers is None else len(layers)


class SliceReader(NamedTuple):
    """Reads the parts of a result for a method; `settings` are those of the whole recipe."""

    method: Method
    base: ModelName | None
    settings: tuple[Settings, ...]

    def whole(self, given: Located) -> tuple[RecipeSlice, ...]:
        """The one part that whole models make."""
        return (self._part(given, [self._model(one, ("model", "parameters")) for one in given.items()]),)

    def slices(self, given: Located) -> tuple[RecipeSlice, ...]:
        """The parts under `slices`; `InvalidRequest` by line for sources of different lengths."""
        parts = [self._slice(one) for one in given.items()]
        if not parts:
            given.refuse("is an empty list", "list parts with their `sources`, or whole models under `models`")
        if sum(one.layers or 0 for one in parts) > LAYERS_MAX:
            given.refuse(f"stacks over {LAYERS_MAX} layers", "take fewer layers with `layer_range`")
        return tuple(parts)

    def _slice(self, given: Located) -> RecipeSlice:
        keys = given.mapping(("sources", "base_model", "parameters"))
        if "sources" not in keys:
            given.refuse("has no `sources`", "add `sources`, a list of models with a `layer_range` each")
        sources = [self._model(one, _OF_SOURCES) for one in keys["sources"].items()]
        reader = self
        if "base_model" in keys:
            reader = reader._replace(base=read_name(keys["base_model"]))
        if "parameters" in keys:
            reader = reader._replace(settings=(read_settings(keys["parameters"], self.method, True), *self.settings))
        part = reader._part(keys["sources"], sources)
        lengths = {len(one.layers or ()) for one in sources}
        if len(lengths) > 1:
            keys["sources"].refuse("have layer ranges of different lengths", "give each the same number of layers")
        return part

    def _part(self, at: Located, models: list[RecipeModel]) -> RecipeSlice:
        """Separate the base from the models; refused if their number is not the method's."""
        method, base = self.method, self.base
        for number, one in enumerate(models):
            if any(one.name.same(other.name) for other in models[:number]):
                line = one.name.line
                raise InvalidRequest(
                    f"recipe, line {line}: {one.name} lists a model twice", hint="give each once, with one weight", line=line
                )
        stacked = bool(models) and models[0].layers is not None
        found = None
        if method.needs_base and base is None:
            raise InvalidRequest(
                f"the recipe has no base_model, which {method.name} needs",
                hint="add `base_model: NAME`, the model that the others were trained from",
                key="base_model",
            )
        if method.takes_base and base is not None:
            found = next((one for one in models if one.name.same(base)), None)
            if found is None and stacked:
                hint = f"list it under `sources` with its layer_range: {method.name} needs it"
                at.refuse(f"lack the base_model {base}", hint)
            found = found or RecipeModel(base, {})
            models = [one for one in models if one is not found]
        elif base is not None and not stacked and not any(one.name.same(base) for one in models):
            raise InvalidRequest(
                f"recipe, line {base.line}: base_model is not one of the models, as {method.name} requires",
                hint="list it under `models`",
                line=base.line,
                key="base_model",
            )
        most = method.models_max or MODELS_MAX
        if not method.models_min <= len(models) <= most:
            besides = " besides the base" if found is not None else ""
            wanted = f"{method.models_min}" if method.models_min == most else f"{method.models_min} to {most}"
            at.refuse(
                f"has {len(models)} models{besides}; {method.name} takes {wanted}",
                "list as many, or use another `merge_method`",
            )
        return RecipeSlice(tuple(models), found, self.settings, at.line)

    def _model(self, given: Located, known: tuple[str, ...]) -> RecipeModel:
        keys = given.mapping(known)
        if "model" not in keys:
            given.refuse("names no model", "add `model: NAME`")
        settings = read_settings(keys["parameters"], self.method, False) if "parameters" in keys else {}
        layers = None
        if "layer_range" in known:
            if "layer_range" not in keys:
                given.refuse("has no layer_range", "give `layer_range: [FIRST, END]`, without the layer END")
            layers = _layers(keys["layer_range"])
        return RecipeModel(read_name(keys["model"]), settings, layers)


def _layers(given: Located) -> range:
    ends = [one.value for one in given.items()]
    if len(ends) != 2 or any(isinstance(one, bool) or not isinstance(one, int) for one in ends):
        given.refuse("is not a pair of whole numbers", "give `layer_range: [FIRST, END]`, without the layer END")
    first, end = (int(str(one)) for one in ends)
    if not 0 <= first < end <= LAYERS_MAX:
        given.refuse(f"is [{first}, {end}], which has no layers", "give `layer_range: [FIRST, END]`, without the layer END")
    return range(first, end)


def read_name(given: Located) -> ModelName:
    """A model's name: text, or the mapping that mergekit writes into model cards."""
    if isinstance(given.value, dict):
        keys = given.mapping(("model", "lora"))
        if "model" not in keys:
            given.refuse("names no model", "add `model: NAME`")
        adapter = _path(keys["lora"]) if "lora" in keys and keys["lora"].value is not None else None
        return ModelName(_path(keys["model"]), adapter, given.line)
    text = given.text()
    model, plus, adapter = text.partition("+")
    if not model or (plus and (not adapter or "+" in adapter)):
        given.refuse(f"is {text!r}", "give MODEL, or MODEL+ADAPTER")
    return ModelName(model, adapter or None, given.line)


def _path(given: Located) -> str:
    if not isinstance(given.value, dict):
        return given.text()
    keys = given.mapping(("path", "revision"))
    if "path" not in keys:
        given.refuse("has no path", "add `path: NAME`")
    revision = keys["revision"].value if "revision" in keys else None
    return keys["path"].text() if revision is None else f"{keys['path'].text()}@{revision}"


def read_settings(given: Located, method: Method, of_models: bool) -> dict[str, Setting]:
    """The settings of a model, or, with `of_models`, those of several, which may have every parameter."""
    if given.value is None:
        return {}
    settings = {}
    known = [one.name for one in method.parameters if one.of_model or of_models]
    for name, inner in given.mapping().items():
        parameter = method.parameter(name)
        if parameter is None:
            names = ", ".join(known) or "none; mergekit ignores the others, so delete the line"
            inner.refuse(f"is not a parameter of {method.name}", did_you_mean(name, known, f"known parameters: {names}"))
        if not of_models and not parameter.of_model:
            inner.refuse("applies to all models together", "move it to `parameters` at the top")
        settings[name] = read_setting(inner, parameter)
    return settings
