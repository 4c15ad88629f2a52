"""The table of the recipes in `recipes/`: what becomes of each, and how its result is compared with mergekit's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_service.wings.merge.token_rows import is_of_tokens
from holdfast_service.wings.merge.vocabulary import read_tokens

THERE = Path(__file__).parent / "recipes"
REFERENCE = Path(__file__).with_name("recipes.npz")  # make_reference.py makes it
SAMPLED = re.compile(r"embed_tokens|lm_head|model\.norm|layers\.(0|7|13)\.(self_attn\.o_proj|input_layernorm)")


class Made(NamedTuple):
    """What a recipe makes: layers, rows of the embedding, and how far a value may be from mergekit's.

    `ulp`: units in the last place of the largest of the tensor; 0 for the same bits.
    """

    layers: int = 8
    rows: int = 34
    ulp: int = 0


RECIPES: dict[str, Made] = {
    "a-template-by-name": Made(),
    "arcee-fusion": Made(),
    "breadcrumbs-ties": Made(),
    "chat-tokens": Made(rows=38, ulp=2),
    "dare-ties": Made(),
    "della": Made(),
    "interleaved": Made(layers=16),
    "karcher": Made(ulp=6),
    "linear": Made(),
    "model-card": Made(),
    "model-stock": Made(ulp=4),
    "model-stock-by-rows": Made(ulp=16),  # rows whose task vectors are opposed amplify what F32 rounds
    "multislerp": Made(ulp=4),
    "nearswap": Made(),
    "nuslerp": Made(ulp=8),
    "nuslerp-of-tasks": Made(ulp=4),
    "one-module": Made(),
    "padded": Made(rows=48, ulp=1),
    "ram": Made(),
    "ramplus": Made(),
    "sce": Made(ulp=4),
    "slerp-slices": Made(ulp=2),
    "slices-of-slerp": Made(layers=9, ulp=2),
    "stacked": Made(layers=10),
    "stacked-vocabularies": Made(rows=36),
    "tied": Made(),
    "ties-gradients": Made(),
    "ties-of-two": Made(),
    "ties-union": Made(rows=38),
    "tokenizer-of-a-model": Made(rows=36),
    "tokenizer-of-the-base": Made(),
    "union": Made(rows=38),
    "upscaled": Made(layers=10),
}
DRAWN = frozenset({"dare-ties", "della"})  # at random, which mergekit does with torch
# The line, if there is one, and a part of the hint.
REFUSED: dict[str, tuple[int | None, str]] = {
    "a-base-elsewhere": (2, "layer_range"),
    "a-parameter-of-no-method": (9, "known parameters"),
    "a-random-seed": (6, "`seed`"),
    "a-revision": (4, "known keys"),
    "a-token-of-another-model": (9, "models that are merged"),
    "model-stock-with-weights": (7, "delete the line"),
    "experts": (4, "mergekit-moe"),
    "slerp-without-a-base": (None, "base_model"),
    "too-many-layers": (3, "at 8"),
    "two-documents": (7, "one after the other"),
}


def text_of(name: str) -> str:
    return (THERE / f"{name}.yml").read_text()


def by_token(key: str, rows: NDArray[Any], directory: Path) -> NDArray[Any]:
    """A tensor with its rows in the order of the tokens' text: mergekit numbers the tokens that it adds in any order."""
    if not is_of_tokens(key):
        return rows
    numbers = read_tokens("", (directory / "tokenizer.json").read_bytes(), None).numbers
    order = [numbers[token] for token in sorted(numbers)]
    return rows[[*order, *sorted({*range(len(rows))} - {*order})]]


def agrees(name: str, key: str, found: NDArray[Any], wanted: NDArray[Any]) -> None:
    """Asserts that a tensor is mergekit's, as far as the recipe's row says. BF16 may be stored as F32."""
    assert found.shape == wanted.shape, key
    ours, its = found.astype(np.float32), wanted.astype(np.float32)
    if RECIPES[name].ulp:
        largest = np.spacing(np.maximum(np.abs(its).max(), np.float32(1)))
        assert np.abs(ours - its).max() <= RECIPES[name].ulp * largest, key
    else:
        assert ours.tobytes() == its.tobytes(), key
