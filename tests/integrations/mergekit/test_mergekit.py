"""A recipe means the same to Holdfast and to mergekit: the whole way, from directories of models to another."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from holdfast_formats import naming
from holdfast_formats.rest.offline import RootJob
from holdfast_service.offline.__main__ import main
from tests.job_requests import a_merge
from tests.wings.merge import zoo
from tests.wings.merge.make_reference import by_mergekit
from tests.wings.merge.published import DRAWN, RECIPES, agrees, text_of


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    for animal in zoo.ANIMALS:
        zoo.put(place, animal)
    return place


@pytest.mark.parametrize("name", RECIPES)
def test_the_same_model(models: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor, and the sizes in the configuration; transformers loads model and tokenizer, and computes with them."""
    monkeypatch.chdir(models)
    with warnings.catch_warnings():  # it imports numpy.core
        warnings.simplefilter("ignore")
        wanted = by_mergekit(text_of(name), models, tmp_path / "wanted")
    work = RootJob(root=str(tmp_path / "root"), job=a_merge("merged", 1, text_of(name)))
    assert main(work.model_dump_json(by_alias=True)) == 0
    made = tmp_path / "root" / naming.checkpoint_path("merged", 1)
    found = load_file(made / "model.safetensors")
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert found[key].dtype == tensor.dtype
        if name not in DRAWN:
            agrees(name, key, found[key].float().numpy(), tensor.float().numpy())
    ours, its = (json.loads((place / "config.json").read_text()) for place in (made, tmp_path / "wanted"))
    for key in ("num_hidden_layers", "vocab_size", "hidden_size"):
        assert ours[key] == its[key], key
    model, tokenizer = AutoModelForCausalLM.from_pretrained(made), AutoTokenizer.from_pretrained(made)
    assert str(model.dtype).removeprefix("torch.") == ours["torch_dtype"]
    assert len(tokenizer) <= model.get_input_embeddings().weight.shape[0]
    with torch.no_grad():
        assert model(**tokenizer("the in", return_tensors="pt")).logits.isfinite().all()
