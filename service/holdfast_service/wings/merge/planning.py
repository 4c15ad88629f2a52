"""Plans a merge as an import of a listing with computed tensors: names, shapes and dtypes are compared first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_formats.disk.packing import natural_key
from holdfast_formats.errors import NoSuchResource, StateMismatch
from holdfast_formats.mapping.box_moves import same
from holdfast_formats.mapping.listing import FetchBox, FileUse, ForeignListing, ForeignTensor, TensorKey, is_of_rank
from holdfast_formats.near_names import did_you_mean
from holdfast_formats.region import Box
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert import importing
from holdfast_service.wings.convert.exports import hugging_face
from holdfast_service.wings.convert.foreign import quantisation
from holdfast_service.wings.convert.foreign.computed import rounded
from holdfast_service.wings.convert.importing import Goal, PlannedImport
from holdfast_service.wings.convert.mapping import MappedListing
from holdfast_service.wings.merge.adapters import applying, combining
from holdfast_service.wings.merge.adapters import config as adapter_config
from holdfast_service.wings.merge.merged_tensor import merged
from holdfast_service.wings.merge.recipe import DTYPES, GROUP, MergeRecipe
from holdfast_service.wings.merge.recipe_models import ModelName
from holdfast_service.wings.merge.result_files import ResultConfig, ResultFiles, small_file, tokens_of
from holdfast_service.wings.merge.scanning import Workspaces
from holdfast_service.wings.merge.sources import MergeSource, MergeSources
from holdfast_service.wings.merge.stacking import Model, StackedPart, parts, stacked_layers, with_heads
from holdfast_service.wings.merge.token_rows import Alignment, rows_of
from holdfast_service.wings.merge.vocabulary import TEMPLATE, ModelTokens, commonest, template_of, united, used

KIND = "merge"
FLOATS = frozenset(DTYPES.values())
NAMED_MAX = 3
_BASE_NAME = "base_model_name_or_path"
_TIES = "tie_word_embeddings"
_ADAPTER_GROUPS = ("adapter", "adapter_model")
_CALLED = {safe: name for name, safe in DTYPES.items()}
_INTEGERS = frozenset({"BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64"})


class Identical(NamedTuple):
    """Values that are not merged, such as masks and counters: equal in every model, which is compared while copying."""

    sources: tuple[ForeignTensor, ...]
    names: tuple[str, ...]

    @property
    def inputs(self) -> tuple[ForeignTensor, ...]:
        return self.sources

    def decode(self, box: Box, fetch: FetchBox) -> NDArray[Any]:
        """`StateMismatch` with tensor and model if one has other values."""
        values = fetch(self.sources[0], box)
        for name, other in zip(self.names[1:], self.sources[1:], strict=True):
            if not np.array_equal(values.view(np.uint8), fetch(other, box).view(np.uint8)):
                spec = other.spec
                raise StateMismatch(
                    f"tensor {spec.name!r} of {spec.dtype} is not merged but copied, and differs between {self.names[0]} "
                    f"and {name}",
                    hint="make it equal in all models first",
                    tensor=spec.name,
                )
        return values


def identical(key: TensorKey, names: Sequence[str], sources: Sequence[ForeignTensor]) -> ForeignTensor:
    first = sources[0].spec
    spec = TensorSpec(key.group, key.name, first.dtype, first.shape)
    return ForeignTensor(spec, (), decoder=Identical(tuple(sources), tuple(names)))


def names_of(recipe: MergeRecipe) -> list[str]:
    """Every model and adapter that a recipe reads; the result gets the small files of the first."""
    named = [recipe.assets_of, *recipe.inputs]
    if recipe.tokenizer is not None:
        named += recipe.tokenizer.named
    names = [one.model for one in named] + [one.adapter for one in named if one.adapter is not None]
    return list(dict.fromkeys(names))


def plan_merge(recipe: MergeRecipe, sources: MergeSources, goal: Goal) -> PlannedImport:
    """Plan a merge, without reading tensors.

    Raises `StateMismatch` and `InvalidRequest`, by tensor and model, for what does not fit the other models or the recipe.
    """
    models = {str(name): _model(name, sources, recipe.group) for name in recipe.inputs}
    if recipe.dialect == "peft" and recipe.group in _ADAPTER_GROUPS:
        return _plan_combination(recipe, models, sources, goal)
    if recipe.group in _ADAPTER_GROUPS:
        adapters = {one.name: one for one in _adapters(recipe, models, sources)}
        applying.check_alike(adapters, recipe.inputs[0].model)
    heads = with_heads(models)
    alignment = _alignment(recipe, heads, sources)
    tensors, spaces, names = dict[TensorKey, ForeignTensor](), Workspaces(), set[str]()
    for number, one in enumerate(parts(recipe, heads)):
        part = one if alignment is None else alignment.aligned(one)
        reference = _reference(recipe, part)
        for other in part.models:
            _check_fits(reference, other, recipe)
        tensors |= _merged(recipe, number, part, spaces)
        names.update(reference.tensors, *part.sources.values())
    notes = list(_notes(recipe, sources, list(names)))
    settings = {key: value for model in models.values() for key, value in model.settings.items()}
    alone = [name for name, model in heads.items() if model is not models[name]]
    if alone:
        notes.append(f"their embedding is their head, too: {', '.join(alone)}")
    if str(recipe.assets_of) in alone or _untied(recipe, sources):
        settings[_TIES] = False
    files = _files(recipe, sources, alignment, settings)
    listing = _listing(recipe, sources, tensors, files)._replace(notes=(*notes, *files.notes))
    wanted = MappedListing(tuple(same(tensor) for tensor in tensors.values()), {})
    planned = importing.planned(sources.watched, listing, wanted, goal)
    return planned._replace(about=_about(recipe, sources))


def _plan_combination(recipe: MergeRecipe, models: Mapping[str, Model], sources: MergeSources, goal: Goal) -> PlannedImport:
    """Plan one adapter that is combined of several."""
    read = combining.read(_adapters(recipe, models, sources))
    names = {module: pair.low.spec.name for one in read for module, pair in one.pairs.items()}
    values = {module: recipe.values(name, 0) for module, name in names.items()}
    shared = next(iter(values.values()), ({}, []))[0]
    how = combining.Combination(
        recipe.method.name,
        float(shared.get("density", 1.0)),
        str(shared.get("majority_sign_method", "total")),
        combining.rank_of(float(shared.get("rank", 0))),
        recipe.seed,
    )
    weights = {module: [float(one["weight"]) for one in held] for module, (_, held) in values.items()}
    made, tensors = combining.combined(read, how, weights), dict[TensorKey, ForeignTensor]()
    for name, tensor in made.tensors.items():
        key = TensorKey(recipe.out_group, name)
        spec = TensorSpec(key.group, name, "F32", tensor.spec.shape)
        tensors[key] = tensor._replace(spec=spec) if recipe.dtype is None else rounded(tensor, key, recipe.dtype)
    files = ResultFiles(sources.source(recipe.assets_of.model), ())
    files.put(adapter_config.NAME, made.config)
    notes = [*_notes(recipe, sources, list(names.values())), f"{adapter_config.NAME} has the result's rank and scale"]
    listing = _listing(recipe, sources, tensors, files)._replace(notes=tuple(notes))
    wanted = MappedListing(tuple(same(tensor) for tensor in tensors.values()), {})
    planned = importing.planned(sources.watched, listing, wanted, goal)
    return planned._replace(about=_about(recipe, sources))


def _adapters(recipe: MergeRecipe, models: Mapping[str, Model], sources: MergeSources) -> list[applying.AdapterParts]:
    return [
        applying.AdapterParts(name.model, _config(sources.source(name.model), sources), models[str(name)].tensors)
        for name in recipe.inputs
    ]


def _untied(recipe: MergeRecipe, sources: MergeSources) -> bool:
    """Whether the configuration of the result ties a head that a model has for itself."""
    ties = [_model_config(sources.source(name.model), sources).get(_TIES) for name in (recipe.assets_of, *recipe.inputs)]
    return ties[0] is True and False in ties[1:]


def _reference(recipe: MergeRecipe, part: StackedPart) -> Model:
    """The model that the others are compared with: that of the small files, or the first."""
    return next((one for one in part.models if one.name == str(recipe.assets_of)), part.models[0])


def _model(name: ModelName, sources: MergeSources, group: str) -> Model:
    asked = _ADAPTER_GROUPS if group in _ADAPTER_GROUPS else (group,)
    tensors = _tensors(sources.source(name.model), asked, f"group {group!r}")
    if asked != _ADAPTER_GROUPS:
        _refuse_quantised(sources.source(name.model), sources, tensors)
    if name.adapter is None:
        return Model(str(name), tensors, {key: one.spec.dtype for key, one in tensors.items()})
    base, adapter = sources.source(name.model), sources.source(name.adapter)
    ties = base.ties.get(group, {})
    untied = {key: one for key, one in tensors.items() if key not in ties}
    parts = applying.AdapterParts(name.adapter, _config(adapter, sources), _tensors(adapter, _ADAPTER_GROUPS, "adapter"))
    made = applying.adapted(applying.BaseWeights(untied, _model_config(base, sources)), parts)
    again = {alias: target for alias, target in ties.items() if target in made.tensors and alias not in made.tensors}
    second = {alias: made.tensors[target] for alias, target in again.items()}
    stored = {alias: made.stored[target] for alias, target in again.items()}
    return Model(str(name), {**made.tensors, **second}, {**made.stored, **stored}, made.settings)


def _model_config(source: MergeSource, sources: MergeSources) -> dict[str, Any]:
    """A model's config.json; empty if it has none that can be read."""
    data = small_file(source, sources, hugging_face.CONFIG)
    try:
        document = {} if data is None else json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _tensors(source: MergeSource, groups: Sequence[str], wanted: str) -> dict[str, ForeignTensor]:
    """The weights of the first of these groups that a source has."""
    tensors = {key: one for key, one in source.tensors(*groups).items() if not is_of_rank(key)}
    if not tensors:
        present = sorted({key.group for key in source.listing.tensors})
        raise NoSuchResource(f"{source.name} has no {wanted}", hint=f"groups: {', '.join(present) or 'none'}")
    return tensors


def _refuse_quantised(source: MergeSource, sources: MergeSources, tensors: Mapping[str, ForeignTensor]) -> None:
    how = quantisation.method(_model_config(source, sources))
    codes = next((name for name, tensor in tensors.items() if quantisation.are_codes(tensor.spec)), None)
    if how is None and codes is None:
        return
    what = (
        f"{source.name} is quantised ({how})" if how else f"tensor {codes!r} of {source.name} looks like quantised weights"
    )
    raise StateMismatch(what, hint="merge the models before quantisation", tensor=codes or "")


def _config(source: MergeSource, sources: MergeSources) -> bytes:
    config_bytes = source.listing.made_assets.get(adapter_config.NAME)
    if config_bytes is not None:
        return config_bytes
    if adapter_config.NAME not in source.listing.assets:
        raise NoSuchResource(
            f"{source.name} has no {adapter_config.NAME}, which describes how to add its adapter",
            hint="pass it as an asset when you save: assets=holdfast.integrations.peft.adapter_config(model)",
        )
    return sources.watched.read(f"{source.number}/{adapter_config.NAME}", 0, adapter_config.BYTES_MAX)


def _check_fits(first: Model, other: Model, recipe: MergeRecipe) -> None:
    """`StateMismatch`, with the nearest names, unless the other model has the same tensors as the first."""
    for here, second in ((first, other), (other, first)):
        missing = sorted(here.tensors.keys() - second.tensors.keys(), key=natural_key)
        if missing:
            left = second.tensors.keys() - here.tensors.keys()
            usual = (
                "use models of one architecture, or import one of them under the other's names: `holdfast import --program`"
            )
            hint = did_you_mean(missing[0], left, usual)
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise StateMismatch(
                f"{second.name} has no tensor {missing[0]!r}{more}, which {here.name} has", hint=hint, tensor=missing[0]
            )
    for name, tensor in first.tensors.items():
        shape, others = tensor.spec.shape, other.tensors[name].spec.shape
        if shape != others:
            what = f"tensor {name!r} has shape {list(shape)} in {first.name}, but {list(others)} in {other.name}"
            raise StateMismatch(what, hint="merge models of equal sizes and vocabulary", tensor=name)
        kinds = first.stored[name], other.stored[name]
        loose = recipe.dtype is not None and set(kinds) <= FLOATS
        if kinds[0] != kinds[1] and not loose:
            what = f"tensor {name!r} is {kinds[0]} in {first.name}, but {kinds[1]} in {other.name}"
            raise StateMismatch(what, hint="set `dtype` in the recipe if both are floating-point", tensor=name)


def _merged(recipe: MergeRecipe, number: int, part: StackedPart, spaces: Workspaces) -> dict[TensorKey, ForeignTensor]:
    """The merged tensors of a part."""
    merged_tensors, reference = {}, _reference(recipe, part)
    for name, tensor in reference.tensors.items():
        key, dtype = TensorKey(recipe.out_group, name), reference.stored[name]
        inputs = tuple(model.tensors[name] for model in part.models)
        if dtype in FLOATS:
            terms = recipe.terms(name, part.depths[name], number, part.sources.get(name, ()))
            merged_tensors[key] = merged(key, recipe.dtype or dtype, inputs, terms, spaces)
        elif dtype in _INTEGERS or not prod(tensor.spec.shape):
            merged_tensors[key] = identical(key, [model.name for model in part.models], inputs)
        else:
            raise StateMismatch(
                f"tensor {name!r} is {dtype}; only {', '.join(sorted(FLOATS))} can be merged",
                hint="merge quantised models before quantisation",
                tensor=name,
            )
    return merged_tensors


def _alignment(recipe: MergeRecipe, models: Mapping[str, Model], sources: MergeSources) -> Alignment | None:
    """How rows are put in the order of the result's tokens; None if the recipe says nothing of them."""
    wanted, assets_of = recipe.tokenizer, str(recipe.assets_of)
    if wanted is None:
        return None
    of_models = {
        str(name): used(tokens_of(sources.source(name.model), sources), rows_of(models[str(name)])) for name in recipe.inputs
    }
    result = of_models.get(assets_of) or tokens_of(sources.source(recipe.assets_of.model), sources)
    others: list[ModelTokens] = []
    if wanted.source == "union":
        others = [tokens for name, tokens in of_models.items() if name != assets_of]
    elif isinstance(wanted.source, ModelName):
        named = of_models.get(str(wanted.source))
        result = named or tokens_of(sources.source(wanted.source.model), sources)
    result = united(result, others, [one.token for one in wanted.tokens])
    base = None if recipe.base is None else str(recipe.base)
    return Alignment(result, of_models, {one.token: one for one in wanted.tokens}, base, wanted.multiple)


def _files(
    recipe: MergeRecipe, sources: MergeSources, alignment: Alignment | None, settings: Mapping[str, Any]
) -> ResultFiles:
    """The small files of the result."""
    base = sources.source(recipe.assets_of.model)
    files = ResultFiles(base, () if recipe.out_group in _ADAPTER_GROUPS else (adapter_config.NAME,))
    tokenizer = base
    if alignment is not None and recipe.tokenizer is not None:
        if isinstance(recipe.tokenizer.source, ModelName):
            tokenizer = sources.source(recipe.tokenizer.source.model)
            files.take_tokenizer(tokenizer, sources)
        files.put_tokenizer(alignment.result, tokens_of(tokenizer, sources))
    if recipe.chat_template is not None:
        about = alignment.result.about if alignment is not None else tokens_of(tokenizer, sources).about
        template = _template(recipe, sources) if recipe.chat_template == "auto" else recipe.chat_template
        if template is None:
            files.notes.append("no model has a chat template")
        else:
            files.put_template(template, about)
    data = small_file(base, sources, hugging_face.CONFIG)
    if data is not None:
        config = ResultConfig(data)
        if recipe.dtype is not None:
            config.set_dtype(_CALLED[recipe.dtype])
        layers = stacked_layers(recipe)
        if layers is not None:
            config.stack(layers)
        if settings:
            config.set(settings)
        if alignment is not None:
            config.set_rows(alignment.rows)
            other = None if tokenizer is base else small_file(tokenizer, sources, hugging_face.CONFIG)
            if other is not None:
                config.set_ids(other, tokenizer.name)
        if config.notes:
            files.put(hugging_face.CONFIG, config.data)
            files.notes += config.notes
    return files


def _template(recipe: MergeRecipe, sources: MergeSources) -> str | None:
    """The chat template that most models have."""
    found = []
    for name in dict.fromkeys(name.model for name in (recipe.assets_of, *recipe.inputs)):
        source = sources.source(name)
        file = small_file(source, sources, TEMPLATE)
        found.append(template_of(tokens_of(source, sources).about, file))
    return commonest(found)


def _listing(
    recipe: MergeRecipe, sources: MergeSources, tensors: Mapping[TensorKey, ForeignTensor], made: ResultFiles
) -> ForeignListing:
    """The listing of the merged checkpoint: computed tensors, and its small files."""
    files = tuple(use for source in sources.by_name.values() for use in _uses(source, recipe))
    return ForeignListing(KIND, tensors, files, assets=tuple(made.copied), made_assets=made.made)


def _uses(source: MergeSource, recipe: MergeRecipe) -> list[FileUse]:
    if source.name == recipe.assets_of.model:
        return list(source.listing.files)
    why = f"configuration and tokenizer come from {recipe.assets_of.model}"
    return [FileUse(one.file, "unused", why) if one.use == "asset" else one for one in source.listing.files]


def _notes(recipe: MergeRecipe, sources: MergeSources, tensors: list[str]) -> list[str]:
    notes = [f"merged by {recipe.method.name} in the dialect of {recipe.dialect}, seed {recipe.seed}"]
    unused = recipe.unused_filters(tensors)
    if unused:
        notes.append(f"filters that match no tensor: {', '.join(unused[:NAMED_MAX])}")
    notes += [note for name in recipe.inputs if (note := _other_base(name, sources))]
    for source in sources.by_name.values():
        notes += [f"{source.name}: {note}" for note in source.listing.notes]
        others = {key.group for key in source.listing.tensors} - {recipe.group, *_ADAPTER_GROUPS}
        if others:
            notes.append(f"{source.name}: not merged: group {', '.join(sorted(others))}")
    return notes


def _other_base(name: ModelName, sources: MergeSources) -> str:
    """What an adapter says of its base, if that has another name: tensors of equal shapes may be another model's."""
    if name.adapter is None:
        return ""
    document = json.loads(_config(sources.source(name.adapter), sources))  # it was read before
    said, own = document.get(_BASE_NAME), _model_config(sources.source(name.model), sources).get("_name_or_path")
    known = {PurePath(str(one)).name for one in (name.model.partition("@")[0], own)}
    if not said or PurePath(str(said)).name in known:
        return ""
    return f"{name.adapter} was trained on {said!r}, as its {adapter_config.NAME} says; it is added to {name.model}"


def _about(recipe: MergeRecipe, sources: MergeSources) -> dict[str, Any]:
    """A merge's entry in state.json, besides that of every import."""
    return {
        "method": recipe.method.name,
        "dialect": recipe.dialect,
        "seed": recipe.seed,
        **({} if recipe.group == recipe.out_group == GROUP else {"group": recipe.group, "out_group": recipe.out_group}),
        "recipe": recipe.text,
        "models": [dict(source.told) for source in sources.by_name.values()],
    }
