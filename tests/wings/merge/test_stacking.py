"""Stacked layers: the names of tensors in the result and in the models, and layers that are not there."""

from __future__ import annotations

import pytest

from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.mapping.listing import ForeignTensor
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.merge.recipe import read_recipe
from holdfast_service.wings.merge.stacking import Model, parts, stacked_layers, with_heads

ENDS = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
TEXT = """\
merge_method: METHOD
slices:
  - sources: [{model: a@1, layer_range: [1, 4]}SECOND]
  - sources: [{model: b@1, layer_range: [0, 1]}]
"""


def model(name: str, stacks: tuple[str, ...] = ("model.layers.",)) -> Model:
    names = [*ENDS, *(f"{stack}{i}.mlp.w" for stack in stacks for i in range(4))]
    return Model(
        name, {one: ForeignTensor(TensorSpec("model", one, "F32", (1,)), ()) for one in names}, dict.fromkeys(names, "")
    )


def test_names() -> None:
    """Embeddings come from the first part, the norm and the head from the last; depths count within a part."""
    recipe = read_recipe(TEXT.replace("METHOD", "passthrough").replace("SECOND", ""))
    first, second = parts(recipe, {"a@1": model("a"), "b@1": model("b")})
    assert {made: names for made, (names,) in first.sources.items()} == {
        ENDS[0]: ENDS[0],
        **{f"model.layers.{i}.mlp.w": f"model.layers.{i + 1}.mlp.w" for i in range(3)},
    }
    assert {made: names for made, (names,) in second.sources.items()} == {
        **{name: name for name in ENDS[1:]},
        "model.layers.3.mlp.w": "model.layers.0.mlp.w",
    }
    assert list(first.depths.values()) == [0.0, 0.0, 0.5, 1.0] and second.depths["model.layers.3.mlp.w"] == 1.0
    assert first.models[0].tensors["model.layers.0.mlp.w"].spec.name == "model.layers.1.mlp.w"
    assert stacked_layers(recipe) == [1, 2, 3, 0]


def test_sources_of_other_layers() -> None:
    """A part may merge layers of different numbers."""
    recipe = read_recipe(TEXT.replace("METHOD", "linear").replace("SECOND", ", {model: b@1, layer_range: [0, 3]}"))
    first, _ = parts(recipe, {"a@1": model("a"), "b@1": model("b")})
    assert first.sources["model.layers.2.mlp.w"] == ("model.layers.3.mlp.w", "model.layers.2.mlp.w")


def test_layers_that_are_not_there() -> None:
    recipe = read_recipe(TEXT.replace("METHOD", "passthrough").replace("SECOND", "").replace("4]", "5]"))
    with pytest.raises(InvalidRequest, match=r"line 3: .* behind the 4 layers of a") as refused:
        list(parts(recipe, {"a@1": model("a"), "b@1": model("b")}))
    assert "at 4" in refused.value.hint


@pytest.mark.parametrize("stacks", [(), ("encoder.block.", "decoder.block.")])
def test_other_than_one_stack(stacks: tuple[str, ...]) -> None:
    recipe = read_recipe(TEXT.replace("METHOD", "passthrough").replace("SECOND", ""))
    with pytest.raises(StateMismatch, match=f"{len(stacks)} stacks") as refused:
        list(parts(recipe, {"a@1": model("a", stacks), "b@1": model("b")}))
    assert "`models`" in refused.value.hint


def test_whole_models() -> None:
    recipe = read_recipe("{merge_method: linear, models: [{model: a@1}, {model: b@1}], parameters: {weight: 1}}")
    (part,) = parts(recipe, {"a@1": model("a"), "b@1": model("b")})
    assert [one.name for one in part.models] == ["a", "b"] and not part.sources and stacked_layers(recipe) is None


def test_heads_of_tied_models() -> None:
    """A model without a head gets its embedding as one, if another has a head."""
    tied = model("b")
    tied = tied._replace(tensors={name: one for name, one in tied.tensors.items() if name != "lm_head.weight"})
    made = with_heads({"a@1": model("a"), "b@1": tied})
    assert made["b@1"].tensors["lm_head.weight"] is tied.tensors[ENDS[0]]
    assert with_heads({"b@1": tied}) == {"b@1": tied}
