"""The models of recipes: whole ones and layers, in every form in which they are published."""

from __future__ import annotations

from holdfast_service.wings.merge.recipe import read_recipe

SLICES = """\
merge_method: passthrough
base_model: a@1
slices:
  - sources:
      - {model: a@1, layer_range: [0, 3]}
  - parameters: {scale: 0.5}
    sources:
      - model: b@1
        layer_range: [1, 3]
        parameters: {scale: [{filter: o_proj, value: 0}]}
parameters: {scale: 2}
"""


def test_slices() -> None:
    """Each has its models, and values of them before those of the slice and of all."""
    recipe = read_recipe(SLICES)
    assert [part.layers for part in recipe.slices] == [3, 2]
    assert [str(one) for one in recipe.inputs] == ["a@1", "b@1"] and str(recipe.assets_of) == "a@1"
    scales = [repr(recipe.terms(name, 0.0, part)) for part in (0, 1) for name in ("o_proj", "q_proj")]
    assert scales == [f"AloneTerms(scale={scale})" for scale in (2.0, 2.0, 0.0, 0.5)]


def test_filters_are_of_names_in_the_model() -> None:
    """Those of one model are compared with the tensor's name there, as mergekit does."""
    recipe = read_recipe(SLICES.replace("o_proj", "layers.1."))
    assert repr(recipe.terms("layers.3.w", 0.0, 1, ("layers.1.w",))) == "AloneTerms(scale=0.0)"
    assert repr(recipe.terms("layers.1.w", 0.0, 1, ("layers.9.w",))) == "AloneTerms(scale=0.5)"
    assert recipe.unused_filters(["layers.2.w"]) == ["layers.1."]


def test_names_as_mappings() -> None:
    """mergekit writes them so into model cards."""
    text = "{merge_method: passthrough, models: [{model: {model: {path: lab/a, revision: R}, lora: {path: lab/b}}}]}"
    for revision, name in (("null", "lab/a"), ("main", "lab/a@main")):
        found = read_recipe(text.replace("R", revision)).inputs
        assert [(one.model, one.adapter) for one in found] == [(name, "lab/b")]


def test_one_module_is_the_model() -> None:
    text = "{merge_method: linear, modules: {m: {models: [{model: a@1}], parameters: {weight: 3}}}, parameters: {weight: 1}}"
    assert read_recipe(text).terms("w", 0) == read_recipe(
        "{merge_method: linear, models: [{model: a@1}], parameters: {weight: 3}}"
    ).terms("w", 0)


def test_truth_as_a_number() -> None:
    """As model cards have it."""
    text = "{merge_method: linear, models: [{model: a@1}], parameters: {weight: 1, normalize: 0.0}}"
    assert "normalize=False" in repr(read_recipe(text).terms("w", 0))
