"""Small models in directories, as Hugging Face programs store them: what the recipes of `recipes/` name.

They are Llamas of eight layers in F32, near their base. Some have other tokens, one has no head of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

Arrays = dict[str, NDArray[Any]]
LAYERS, HIDDEN, INNER, HEADS = 8, 16, 24, 2
WORDS = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", "th", "he", "in", "er", "an"]
MERGES = ["t h", "h e", "i n", "e r", "a n"]
CHAT = ("<|im_start|>", "<|im_end|>")


class Animal(NamedTuple):
    """A model: what it adds to the tokens of the base, whether it has a head of its own, and its chat template."""

    name: str
    seed: int
    added: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    tied: bool = False
    template: str | None = None
    padding: int = 0  # rows of the embedding that no token has


ANIMALS = (
    Animal("lab/base", 0),
    Animal("lab/math", 1),
    Animal("lab/code", 2),
    Animal("lab/story", 3),
    Animal("lab/chat", 4, added=CHAT, template="{% for m in messages %}{{ m['content'] }}{% endfor %}"),
    Animal("lab/words", 5, words=("on", "at"), added=("<|im_end|>",), padding=6),
    Animal("lab/tied", 6, tied=True),
)


def vocabulary(animal: Animal) -> dict[str, int]:
    names = [*WORDS[:20], *animal.words, *WORDS[20:]] if animal.words else WORDS
    return {word: number for number, word in enumerate(names)}


def tokenizer(animal: Animal) -> dict[str, Any]:
    vocab = vocabulary(animal)
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": number, "content": word, **special} for word, number in vocab.items() if word in WORDS[:3]]
    added += [{"id": len(vocab) + i, "content": word, **special} for i, word in enumerate(animal.added)]
    merges = MERGES + [" ".join(word) for word in animal.words]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }


def rows_of(animal: Animal) -> int:
    return len(vocabulary(animal)) + len(animal.added) + animal.padding


def config(animal: Animal) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": rows_of(animal),
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": animal.tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
    }


def shapes() -> dict[str, tuple[int, ...]]:
    """Of the tensors of layers, and of the norm."""
    half, made = HIDDEN // HEADS, {"model.norm.weight": (HIDDEN,)}
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        made |= {
            f"{layer}.input_layernorm.weight": (HIDDEN,),
            f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
            f"{layer}.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": (half, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": (half, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{layer}.mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{layer}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"{layer}.mlp.down_proj.weight": (HIDDEN, INNER),
        }
    return made


def arrays(animal: Animal) -> Arrays:
    base, own = (np.random.default_rng(seed) for seed in (100, animal.seed))
    made: Arrays = {}
    sized = {**shapes(), "model.embed_tokens.weight": (64, HIDDEN), "lm_head.weight": (64, HIDDEN)}
    for name, shape in sized.items():
        values = base.standard_normal(shape, np.float32)
        if animal.seed:
            values += np.float32(0.1) * own.standard_normal(shape, np.float32)
        made[name] = values[: rows_of(animal)] if shape[0] == 64 else values
    if animal.tied:
        del made["lm_head.weight"]
    return made


def put(place: Path, animal: Animal, model: Arrays | None = None) -> Path:
    """Write a model's directory below `place`."""
    directory = place / animal.name
    directory.mkdir(parents=True)
    save_file(model or arrays(animal), directory / "model.safetensors", metadata={"format": "pt"})
    about: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 64,
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": animal.added[-1] if animal.added else "</s>",
    }
    if animal.template is not None:
        about["chat_template"] = animal.template
    documents = {"config": config(animal), "tokenizer": tokenizer(animal), "tokenizer_config": about}
    for name, document in documents.items():
        (directory / f"{name}.json").write_text(json.dumps(document))
    return directory
