"""A recipe means the same to Holdfast and to mergekit: the whole way, from directories of models to another."""

from __future__ import annotations

import json
import warnings
from importlib import resources
from pathlib import Path

import pytest
import torch
from mergekit._data import chat_templates
from mergekit.architecture import json_definitions
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from holdfast_formats import naming
from holdfast_formats.rest.offline import RootJob
from holdfast_service.offline.__main__ import main
from holdfast_service.wings.merge.stacking import is_before_layers
from holdfast_service.wings.merge.token_rows import is_of_tokens
from holdfast_service.wings.merge.vocabulary import TEMPLATES
from tests.job_requests import a_merge
from tests.wings.merge import zoo
from tests.wings.merge.make_reference import by_mergekit
from tests.wings.merge.published import DRAWN, RECIPES, agrees, by_token, text_of

# An old form, whose head is a layer.
OTHER_NAMES = frozenset({"phi-1"})


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
            ours = by_token(key, found[key].float().numpy(), made)
            agrees(name, key, ours, by_token(key, tensor.float().numpy(), tmp_path / "wanted"))
    check_files(made, tmp_path / "wanted")
    if "base_model" in text_of(name):  # without one, mergekit takes the tokenizer of a model at random
        check_tokenizer(made, tmp_path / "wanted")


def test_what_is_before_the_layers() -> None:
    """Of every architecture of one module that mergekit knows, and which tensors have a row for each token."""
    seen = 0
    for file in Path(json_definitions.__file__).parents[1].glob("_data/architectures/*.json"):
        about = json.loads(file.read_text())
        if about.get("modules") or file.stem in OTHER_NAMES:
            continue
        for key, before in (("pre_weights", True), ("post_weights", False)):
            for weight in about[key]:
                assert is_before_layers(weight["name"]) == before, (file.name, weight["name"])
                assert is_of_tokens(weight["name"]) == (weight.get("vocabulary_axis") == 0), (file.name, weight["name"])
                seen += 1
    assert seen > 80


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [False, True])
def test_chat_templates(name: str, prompt: bool) -> None:
    """Each name makes the text that mergekit's own template makes of the same messages."""
    chats = [
        [{"role": role, "content": f" {role} {{}}\n#{number} "} for number, role in enumerate(roles.split())]
        for roles in ("user", "system user", "system user assistant user", "user assistant", "system user assistant")
    ]
    its = (resources.files(chat_templates) / f"{name}.jinja").read_text()
    special = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": prompt}
    wanted, found = (
        render_jinja_template(chats, chat_template=template, **special)[0] for template in (its, TEMPLATES[name])
    )
    assert found == wanted


def check_files(made: Path, wanted: Path) -> None:
    """The configuration is mergekit's, and transformers computes with it, the tokenizer and the model."""
    ours, its = (json.loads((place / "config.json").read_text()) for place in (made, wanted))
    for key in ("num_hidden_layers", "vocab_size", "hidden_size"):
        assert ours[key] == its[key], key
    model, tokenizer = AutoModelForCausalLM.from_pretrained(made), AutoTokenizer.from_pretrained(made)
    assert str(model.dtype).removeprefix("torch.") == ours["torch_dtype"]
    assert model.get_input_embeddings().weight.shape[0] == ours["vocab_size"]
    if "lm_head.weight" in load_file(made / "model.safetensors"):  # it is loaded, not tied
        assert model.get_output_embeddings().weight.equal(load_file(made / "model.safetensors")["lm_head.weight"])
    assert set(tokenizer.get_vocab()) == set(AutoTokenizer.from_pretrained(wanted).get_vocab())
    with torch.no_grad():
        assert model(**tokenizer("the in", return_tensors="pt")).logits.isfinite().all()


def check_tokenizer(made: Path, wanted: Path) -> None:
    """Text becomes the same tokens, and messages the same text."""
    tokenizer, other = AutoTokenizer.from_pretrained(made), AutoTokenizer.from_pretrained(wanted)
    text = "then in on<|im_end|>at the <|im_start|>er"
    assert tokenizer.tokenize(text) == other.tokenize(text)
    if other.chat_template is not None:
        asked = [{"role": "user", "content": "he"}, {"role": "assistant", "content": "in"}]
        assert tokenizer.apply_chat_template(asked, tokenize=False) == other.apply_chat_template(asked, tokenize=False)
