"""Recipes: what mergekit's keys mean, and that whatever is not understood is refused by key and line."""

from __future__ import annotations

import pytest

from holdfast_formats.errors import InvalidRequest, LimitExceeded
from holdfast_service.wings.merge.averages import MeanTerms, SlerpTerms
from holdfast_service.wings.merge.recipe import read_recipe
from holdfast_service.wings.merge.settings import depths
from holdfast_service.wings.merge.sparsifying import Sparsity
from holdfast_service.wings.merge.spheres import SphereTerms
from holdfast_service.wings.merge.task_vectors import TaskTerms

TIES = """\
merge_method: ties
base_model: llama@0
models:
  - model: llama@0
  - model: llama@5
    parameters:
      weight: 1
      density: 0.5
  - model: ./other+adapter@3
    parameters:
      weight:
        - {filter: mlp, value: [0.0, 1.0]}
        - {filter: "*", value: 1e-1}
parameters:
  density: 0.25
  normalize: false
  int8_mask: true
dtype: bfloat16
out_dtype: float32
seed: 9
"""


def test_what_it_says() -> None:
    """The base is not a model; values of a model come before those of all, by the first filter that fits."""
    recipe = read_recipe(TIES)
    assert [str(one) for one in recipe.inputs] == ["llama@5", "./other+adapter@3", "llama@0"]
    assert (recipe.dtype, recipe.seed, recipe.dialect) == ("F32", 9, "mergekit")
    sparsities = (Sparsity("trim", 0.5), Sparsity("trim", 0.25))
    terms = TaskTerms("layers.1.mlp.w", (1.0, 0.25), sparsities, "none", True, False, 1.0, 9, "mergekit")
    assert recipe.terms("layers.1.mlp.w", 0.25) == terms
    assert recipe.terms("layers.1.attn.w", 0.25) == terms._replace(tensor="layers.1.attn.w", weights=(1.0, 0.1))
    assert recipe.unused_filters(["layers.1.attn.w"]) == ["mlp"]


def test_gradients() -> None:
    """From the first layer to the last; the first point is also that of tensors of no layer."""
    names = ["embed_tokens.weight", *(f"model.layers.{i}.self_attn.q" for i in range(5)), "model.norm.weight"]
    assert list(depths(names).values()) == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 0.0]
    assert depths(["layers.0.w"]) == {"layers.0.w": 1.0}
    recipe = read_recipe("{merge_method: slerp, base_model: a@1, models: [{model: b@1}], parameters: {t: [0, 0.5, 0.3]}}")
    found = [recipe.terms(name, depth) for name, depth in depths(names).items()]
    assert found[3] == SlerpTerms(0.5) and found[-2] == SlerpTerms(0.3)
    assert found[2] == SlerpTerms(0.25)


def test_the_dialect_of_paddle() -> None:
    """It has other defaults, and normalizes the weights of task vectors beforehand."""
    text = "{{merge_method: {}, dialect: paddle, base_model: c@1, models: [{{model: a@1}}, {{model: b@1}}], parameters: {}}}"
    dare = read_recipe(text.format("dare_linear", "{weight: 2, density: 0.5}")).terms("w", 0)
    assert isinstance(dare, TaskTerms) and (dare.weights, dare.rescale) == ((0.5, 0.5), "density")
    ties = read_recipe(text.format("ties", "{weight: 2, density: 0.5, trim: count, rescale: none}")).terms("w", 0)
    assert isinstance(ties, TaskTerms) and (ties.weights, ties.rescale) == ((2.0, 2.0), "none")
    assert ties.sparsities[0].trim == "count"
    linear = read_recipe("{merge_method: linear, models: [{model: a@1}], parameters: {weight: 1}}")
    assert linear.terms("w", 0) == MeanTerms((1.0,), True)


LINEAR = "merge_method: linear\nmodels:\n  - model: a@1\n    parameters: {weight: 1}\n"
KARCHER = "merge_method: karcher\nmodels: [{model: a@1}]\nparameters: {max_iter: STEPS}\n"
SLICES = """\
merge_method: linear
slices:
  - sources:
    - {model: a@1, layer_range: [0, 2]}
    - {model: b@1, layer_range: [2, 4]}
base_model: base
"""
WRONG = {
    "an unknown key": (f"{LINEAR}dtyp: float32\n", 5, "dtyp", "dtype"),
    "two tokenizers": (f"{LINEAR}tokenizer: {{}}\ntokenizer_source: base\n", 6, "tokenizer_source", "delete"),
    "a key of tokenizers": (f"{LINEAR}tokenizer: {{sorce: base}}\n", 5, "sorce", "source"),
    "forced without a source": (f"{LINEAR}tokenizer: {{tokens: {{a: {{force: true}}}}}}\n", 5, "forced", "source"),
    "no truth": (f"{LINEAR}tokenizer: {{tokens: {{a: {{force: 3}}}}}}\n", 5, "force", ""),
    "a row of no model": (f"{LINEAR}tokenizer: {{tokens: {{a: {{source: {{kind: model_token}}}}}}}}\n", 5, "source", ""),
    "another kind of row": (f"{LINEAR}tokenizer: {{tokens: {{a: {{source: {{kind: ones}}}}}}}}\n", 5, "source", "zero"),
    "no multiple": (f"{LINEAR}tokenizer: {{pad_to_multiple_of: 0}}\n", 5, "pad_to_multiple_of", ""),
    "no template": (f"{LINEAR}chat_template: chatlm\n", 5, "chat_template", "llama3"),
    "no slices": ("merge_method: linear\nslices: []\n", 2, "slices", ""),
    "slices and models": (f"{LINEAR}slices: []\n", 5, "slices", "keep one"),
    "several modules": ("merge_method: linear\nmodules: {a: {models: []}, b: {models: []}}\n", 2, "modules", "`models`"),
    "a slice without sources": ("merge_method: linear\nslices:\n  - parameters: {}\n", 3, "sources", ""),
    "a source without layers": (SLICES.replace(", layer_range: [2, 4]", ""), 5, "layer_range", "FIRST, END"),
    "layers that are no pair": (SLICES.replace("[2, 4]", "[2]"), 5, "layer_range", "FIRST, END"),
    "no layers": (SLICES.replace("[2, 4]", "[2, 2]"), 5, "layer_range", "FIRST, END"),
    "ranges of other lengths": (SLICES.replace("[2, 4]", "[2, 5]"), 3, "lengths", "same number"),
    "a base that is no source": (SLICES.replace("linear", "slerp"), 3, "base_model", "layer_range"),
    "layers of a whole model": (LINEAR.replace("parameters", "layer_range: [0, 2]\n    parameters"), 4, "layer_range", ""),
    "a path without a path": (LINEAR.replace("a@1", "{model: {revision: main}}"), 3, "path", ""),
    "a seed of mergekit's": (f"{LINEAR}random_seed: 3\n", 5, "random_seed", "`seed`"),
    "experts": (f"{LINEAR}experts: []\n", 5, "experts", "mergekit-moe"),
    "a parameter that mergekit ignores": (LINEAR.replace("linear", "karcher"), 4, "weight", "delete the line"),
    "half a step": (KARCHER.replace("STEPS", "2.5"), 3, "max_iter", ""),
    "too many steps": (KARCHER.replace("STEPS", "1e6"), 3, "max_iter", ""),
    "one model of two": (LINEAR.replace("linear", "nuslerp"), 2, "1 models", ""),
    "another election": (TIES.replace("normalize: false", "elect: most"), 16, "elect", ""),
    "no method": (LINEAR.replace("linear", "linaer"), 1, "linaer", "linear"),
    "a parameter of another method": (f"{LINEAR}parameters:\n  density: 0.5\n", 6, "density", "weight"),
    "an unknown parameter": (LINEAR.replace("weight", "wieght"), 4, "wieght", "weight"),
    "a shared parameter of one model": (LINEAR.replace("weight: 1", "normalize: true"), 4, "normalize", "at the top"),
    "no number": (LINEAR.replace("weight: 1", "weight: much"), 4, "weight", ""),
    "not finite": (LINEAR.replace("weight: 1", "weight: .inf"), 4, "weight", ""),
    "true as a number": (LINEAR.replace("weight: 1", "weight: true"), 4, "weight", ""),
    "a gradient of truth": (f"{LINEAR}parameters: {{normalize: [true, false]}}\n", 5, "normalize", ""),
    "an empty gradient": (LINEAR.replace("weight: 1", "weight: []"), 4, "weight", ""),
    "a filter without a value": (LINEAR.replace("weight: 1", "weight: [{filter: x}]"), 4, "weight", ""),
    "an unknown key of a filter": (LINEAR.replace("weight: 1", "weight: [{fliter: x, value: 1}]"), 4, "fliter", "filter"),
    "an unknown key of a model": (LINEAR.replace("parameters", "params"), 4, "params", "parameters"),
    "a model without a name": ("merge_method: linear\nmodels:\n  - parameters: {}\n", 3, "models", ""),
    "two adapters": (LINEAR.replace("a@1", "a+b+c"), 3, "model", "MODEL+ADAPTER"),
    "a model twice": (f"{LINEAR}  - model: a@1\n", 5, "a@1", ""),
    "a base that is not a model": (f"{LINEAR}base_model: b@1\n", 5, "base_model", "under `models`"),
    "another dtype": (f"{LINEAR}dtype: int8\n", 5, "dtype", "bfloat16"),
    "another seed": (f"{LINEAR}seed: -1\n", 5, "seed", ""),
    "another dialect": (f"{LINEAR}dialect: torch\n", 5, "dialect", "paddle"),
    "a key twice": (f"{LINEAR}seed: 1\nseed: 2\n", 6, "seed", ""),
    "no list of models": ("merge_method: linear\nmodels: a@1\n", 2, "models", ""),
    "no YAML": ("merge_method: [", 1, "", ""),
    "a tag": (f"{LINEAR}seed: !!python/name:os.system\n", 5, "seed", ""),
}


@pytest.mark.parametrize("what", WRONG)
def test_refused_by_key_and_line(what: str) -> None:
    text, line, key, hint = WRONG[what]
    with pytest.raises(InvalidRequest) as refused:
        read_recipe(text)
    assert refused.value.members["line"] == line and f"line {line}" in refused.value.detail
    assert key in refused.value.detail and hint in refused.value.hint


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "empty"),
        ("[]", "mapping"),
        ("models: []", "merge_method"),
        ("merge_method: linear", "models"),
        ("{merge_method: linear, models: []}", "0 models"),
        ("{merge_method: ties, models: [{model: a@1}]}", "base_model"),
        ("{merge_method: slerp, base_model: a@1, models: [{model: b@1}, {model: c@1}]}", "2 models besides the base"),
        ("{merge_method: della, dialect: paddle, base_model: a@1, models: [{model: b@1}]}", "dialect"),
        ("a: &a [*a]", "too deep"),
        ("{" * 3000, "line 1: too many values, or too deep"),
        ("[" * 30_000, "too deep"),
        ("- " * 3000, "too deep"),
        ("a:\n  " + "? " * 3000, "line 2: too many values, or too deep"),
    ],
)
def test_refused(text: str, what: str) -> None:
    with pytest.raises((InvalidRequest, LimitExceeded)) as refused:
        read_recipe(text)
    assert what in refused.value.detail


def test_an_optional_base() -> None:
    """It is subtracted if there is one, in the list or not."""
    text = "{merge_method: multislerp, models: [{model: a@1}, {model: b@1}]BASE, parameters: {weight: 1}}"
    for base, inputs in (("", "ab"), (", base_model: c@1", "abc"), (", base_model: a@1", "ba")):
        recipe = read_recipe(text.replace("BASE", base))
        assert [one.model[0] for one in recipe.inputs] == list(inputs)
    found = recipe.terms("w", 0)
    assert isinstance(found, SphereTerms) and found.models == 1


def test_election_by_count() -> None:
    """Paddle's: the sign that most models have."""
    text = "{merge_method: ties, base_model: c@1, models: [{model: a@1}], parameters: {weight: 1, elect: count}}"
    found = read_recipe(text).terms("w", 0)
    assert isinstance(found, TaskTerms) and found.elect == "count"


@pytest.mark.parametrize(
    ("parameters", "what"),
    [
        ("{}", "no weight"),
        ("{weight: 1, density: 0}", "would drop a whole model"),
        ("{weight: 1, density: 0.9, epsilon: 0.2}", "±"),
    ],
)
def test_refused_for_a_tensor(parameters: str, what: str) -> None:
    recipe = read_recipe(f"{{merge_method: della, base_model: a@1, models: [{{model: b@1}}], parameters: {parameters}}}")
    with pytest.raises(InvalidRequest, match=what):
        recipe.terms("w", 0)


def test_weights_that_cancel() -> None:
    text = LINEAR + "  - model: b@1\n    parameters: {weight: -1}\n"
    with pytest.raises(InvalidRequest, match="sum to 0"):
        read_recipe(text).terms("w", 0)


def test_a_long_recipe_is_refused() -> None:
    with pytest.raises(LimitExceeded):
        read_recipe(f"{LINEAR}# {'x' * 40_000}")
