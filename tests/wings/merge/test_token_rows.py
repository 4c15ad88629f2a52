"""Rows of embeddings in the order of other tokens: from where each comes, whatever is read at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.mapping.listing import ForeignTensor
from holdfast_formats.region import Box
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.merge.recipe_models import ModelName
from holdfast_service.wings.merge.stacking import Model, StackedPart
from holdfast_service.wings.merge.token_rows import Alignment, is_of_tokens, rows_of
from holdfast_service.wings.merge.vocabulary import ModelTokens, TokenSource

NAME = "model.embed_tokens.weight"
WORDS = {"a": "xyz", "b": "yzw", "c": "zv"}  # the tokens of three models, by their first letters
RESULT = "xyzwvu"
ROWS = {
    name: np.arange(len(words) * 4, dtype=np.float32).reshape(-1, 4) + 100 * at
    for at, (name, words) in enumerate(WORDS.items())
}


def tokens(name: str, words: str) -> ModelTokens:
    return ModelTokens(name, {word: number for number, word in enumerate(words)}, {}, {})


def model(name: str) -> Model:
    tensor = ForeignTensor(TensorSpec(name, NAME, "F32", ROWS[name].shape), ())
    return Model(name, {NAME: tensor, "model.layers.0.w": tensor}, {})


def aligned(name: str, *sources: TokenSource, base: str | None = None, multiple: int = 1, step: int = 99) -> NDArray[Any]:
    """The rows of one of the models, read `step` rows at a time."""
    alignment = Alignment(
        tokens("r", RESULT),
        {one: tokens(one, words) for one, words in WORDS.items()},
        {one.token: one for one in sources},
        base,
        multiple,
    )
    part = alignment.aligned(StackedPart([model(one) for one in WORDS], {}, {}))
    tensor = part.models[list(WORDS).index(name)].tensors[NAME]
    assert tensor.spec.shape == (alignment.rows, 4) and tensor.decoder is not None

    def fetch(stored: ForeignTensor, box: Box, into: NDArray[Any] | None = None) -> NDArray[Any]:
        assert into is None
        return ROWS[stored.spec.group][box.slices]

    boxes = [Box((at, 1), (min(step, alignment.rows - at), 2)) for at in range(0, alignment.rows, step)]
    return np.concatenate([tensor.decoder.decode(box, fetch) for box in boxes])


def source(token: str, model: str | None, row: str | int = "", force: bool = False) -> TokenSource:
    return TokenSource(token, False, None if model is None else ModelName(model, None, 1), row or token, force, 7)


@pytest.mark.parametrize("step", [1, 4, 99])
def test_rows(step: int) -> None:
    """Its own; that of the only model with the token; else the mean; zeros for a token that no model has."""
    a, b, c = (ROWS[name][:, 1:3] for name in "abc")
    found = aligned("c", step=step)
    assert found.tolist() == np.stack([a[0], (a[1] + b[0]) / 2, c[0], b[2], c[1], np.zeros(2)]).tolist()
    assert aligned("c", base="b", step=step)[1].tolist() == b[0].tolist()


def test_named_rows() -> None:
    """Of another model, or of another token, in every model if forced."""
    a, b, _ = (ROWS[name][:, 1:3] for name in "abc")
    assert aligned("a", source("y", "b"))[1].tolist() == a[1].tolist()
    assert aligned("a", source("y", "b", force=True))[1].tolist() == b[0].tolist()
    assert aligned("c", source("y", "b", "w"))[1].tolist() == b[2].tolist()
    assert aligned("c", source("y", "b", 2))[1].tolist() == b[2].tolist()
    assert aligned("a", source("y", None, force=True))[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("step", [1, 99])
def test_padding(step: int) -> None:
    """The mean of all other rows of the model."""
    found = aligned("c", multiple=8, step=step)
    assert found.shape == (8, 2) and found[6].tolist() == found[7].tolist()
    assert np.allclose(found[6], found[:6].mean(axis=0), rtol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [(source("y", "d"), "d is not merged"), (source("y", "a", "w"), "no token 'w'"), (source("y", "a", 3), "no token 3")],
)
def test_rows_that_are_not_there(wrong: TokenSource, what: str) -> None:
    with pytest.raises(InvalidRequest, match=what) as refused:
        aligned("c", wrong)
    assert refused.value.members["line"] == 7 and refused.value.hint


def test_unknown_names() -> None:
    """A tensor that seems to have a row for each token stops the merge, if rows would move."""
    odd = model("a")
    odd = odd._replace(tensors={**odd.tensors, "words.weight": odd.tensors[NAME]})
    for words, fits in (("xyz", True), ("xyzw", False), ("yxz", False)):
        alignment = Alignment(tokens("r", words), {"a": tokens("a", "xyz")}, {}, None, 1)
        if fits:
            alignment.aligned(StackedPart([odd], {}, {}))
        else:
            with pytest.raises(StateMismatch, match=r"words\.weight"):
                alignment.aligned(StackedPart([odd], {}, {}))


def test_terms_identify_rows() -> None:
    """A job that is resumed with other rows begins again."""
    alignments = [Alignment(tokens("r", words), {"a": tokens("a", "xyz")}, {}, None, 1) for words in ("xyz", "xzy", "xyz")]
    terms = [
        one.aligned(StackedPart([model("a")], {}, {})).models[0].tensors[NAME].decoder.terms  # type: ignore[union-attr]
        for one in alignments
    ]
    assert terms[0] == terms[2] != terms[1]


def test_which_tensors_have_rows() -> None:
    names = (NAME, "lm_head.weight", "lm_head.bias", "gpt_neox.embed_out.weight", "output.weight", "transformer.wte.weight")
    assert all(map(is_of_tokens, names))
    others = ("model.embed_positions.weight", "transformer.wpe.weight", "attention.output.weight", "model.norm.weight")
    assert not any(map(is_of_tokens, others))
    assert rows_of(model("a")) == 3
    with pytest.raises(StateMismatch, match="no embedding"):
        rows_of(Model("m", {}, {}))
