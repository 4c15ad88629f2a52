"""A committed directory is a Hugging Face checkpoint: transformers loads it as it is, bit for bit (promise 5)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from holdfast import Checkpointer
from holdfast_formats import naming
from tests.kit.daemons import own_daemon


def tiny(tied: bool) -> LlamaForCausalLM:
    """A Llama of a few thousand parameters in bfloat16."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(torch.bfloat16)


# A daemon's socket and root.
socket = own_daemon(listen="none")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("file_bytes_max", [10_000, 5_000_000_000])
def test_from_pretrained_loads_a_committed_directory(socket, tied: bool, file_bytes_max: int) -> None:
    """One file or many, tied or not: every tensor is bit-equal, the configuration comes along, ties are ties again."""
    model = tiny(tied)
    run = f"llama-{tied}-{file_bytes_max}"
    state = {"model": model, "optim": torch.optim.AdamW(model.parameters())}
    assets = [model.config, model.generation_config, {"tokenizer.json": {"version": "1.0"}}]
    with Checkpointer(run, state, at=socket.socket, assets=assets, file_bytes_max=file_bytes_max) as checkpointer:
        checkpointer.save(1, wait="durable")
    directory = socket.root / naming.checkpoint_path(run, 1)
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor.view(torch.int16), expected[name].view(torch.int16)), name
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert AutoConfig.from_pretrained(directory).vocab_size == 64
    files = sorted(directory.glob("*.safetensors"))
    assert (len(list(directory.glob("model*.safetensors"))) > 1) == (file_bytes_max == 10_000)
    for file in files:
        with safe_open(file, "pt") as opened:
            assert all(opened.get_tensor(name) is not None for name in opened.keys())  # noqa: SIM118 - not a mapping


def test_a_tied_model_goes_back_into_an_untied_one_and_the_other_way(socket) -> None:
    """Tied weights are stored once; both names can be restored from them."""
    with Checkpointer("ties", {"model": tiny(True)}, at=socket.socket) as checkpointer:
        checkpointer.save(1, wait="durable")
    untied = tiny(False)
    with torch.no_grad():
        untied.lm_head.weight.zero_()
    with Checkpointer("ties", {"model": untied}, at=socket.socket) as checkpointer:
        assert checkpointer.restore() == 1
    assert torch.equal(untied.lm_head.weight, untied.model.embed_tokens.weight)
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


def test_assets_of_every_form(tmp_path: Path, socket) -> None:
    """A directory, a file, and a mapping; weights in the directory are left out."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "old.safetensors").write_text("x")
    (tmp_path / "vocab.txt").write_text("a b")
    assets = [tmp_path, tmp_path / "vocab.txt", {"notes.md": "hello"}]
    with Checkpointer("assets", {"x": torch.ones(1)}, at=socket.socket, assets=assets) as checkpointer:
        checkpointer.save(1, wait="durable")
    names = {p.name for p in (socket.root / naming.checkpoint_path("assets", 1)).iterdir()}
    assert {"config.json", "vocab.txt", "notes.md"} <= names and "old.safetensors" not in names
