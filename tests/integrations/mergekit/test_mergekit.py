"""A recipe means the same to Holdfast and to mergekit: the whole way, from two directories of models to a third."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.numpy import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from holdfast_formats import naming
from holdfast_formats.rest.offline import RootJob
from holdfast_service.offline.__main__ import main
from tests.job_requests import a_merge

NAMES = ("base", "one", "two")
RECIPES = {
    "linear": "models: [{model: one, parameters: {weight: 0.3}}, {model: two, parameters: {weight: 0.9}}]",
    "slerp": """
base_model: base
models: [{model: base}, {model: one}]
parameters:
  t:
    - {filter: self_attn, value: [0, 0.5, 0.3]}
    - {filter: mlp, value: [1, 0.2]}
    - {value: 0.5}
""",
    "task_arithmetic": """
base_model: base
models: [{model: one}, {model: two}]
parameters: {weight: [0.2, 0.9], lambda: 0.8}
""",
    "ties": """
base_model: base
models:
  - {model: one, parameters: {weight: 1, density: 0.4}}
  - {model: two, parameters: {weight: [{filter: mlp, value: 0.2}, {value: 0.7}], density: 0.6}}
""",
    "breadcrumbs": """
base_model: base
models: [{model: one}, {model: two}]
parameters: {weight: 0.5, density: 0.8, gamma: 0.05}
""",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three small models in F32."""
    place = tmp_path_factory.mktemp("models")
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    for seed, name in enumerate(NAMES):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(place / name)
    return place


def merge_by_mergekit(recipe: str, out: Path) -> None:
    with warnings.catch_warnings():  # it imports numpy.core
        warnings.simplefilter("ignore")
        from mergekit.config import MergeConfiguration
        from mergekit.merge import run_merge
        from mergekit.options import MergeOptions

        config = MergeConfiguration.model_validate(yaml.safe_load(recipe))
        run_merge(config, str(out), MergeOptions(copy_tokenizer=False, write_model_card=False))


@pytest.mark.parametrize("method", RECIPES)
def test_the_same_model(models: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit, but for slerp, which sums whole tensors: there to two units in the last place of the inputs."""
    monkeypatch.chdir(models)
    text = f"merge_method: {method}\ndtype: float32\n{RECIPES[method]}\n"
    merge_by_mergekit(text, tmp_path / "wanted")
    work = RootJob(root=str(tmp_path / "root"), job=a_merge("merged", 1, text))
    assert main(work.model_dump_json(by_alias=True)) == 0
    found = load_file(tmp_path / "root" / naming.checkpoint_path("merged", 1) / "model.safetensors")
    wanted = {name: array for file in (tmp_path / "wanted").glob("*.safetensors") for name, array in load_file(file).items()}
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        if method == "slerp":
            sides = [load_file(models / one / "model.safetensors")[name] for one in ("base", "one")]
            assert np.abs(found[name] - array).max() <= 2 * np.spacing(np.abs(sides).max()), name
        else:
            assert found[name].tobytes() == array.tobytes(), name
