"""The config.json of a merged model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast_formats.errors import StateMismatch
from holdfast_service.wings.merge.result_files import ResultConfig


def stacked(config: Any, layers: list[int]) -> tuple[Any, list[str]]:
    made = ResultConfig(json.dumps(config).encode())
    made.stack(layers)
    return json.loads(made.data), made.notes


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer", "num_layers"])
def test_layers(key: str) -> None:
    """Their number, and what a config says of each."""
    config = {key: 3, "layer_types": ["full", "sliding", "none"], "sizes": [1, 2, 3]}
    made, notes = stacked(config, [0, 1, 1, 2])
    assert made == {key: 4, "layer_types": ["full", "sliding", "sliding", "none"], "sizes": [1, 2, 3]}
    assert notes == [f"{key} in config.json is now 4"]
    assert stacked(config, [0, 1, 2]) == (config, [])
    assert stacked({"text_config": config}, [2, 0]) == (
        {"text_config": {key: 2, "layer_types": ["none", "full"], "sizes": [1, 2, 3]}},
        [f"{key} in config.json is now 2"],
    )


def test_what_cannot_be_said() -> None:
    """A config without a number of layers, or with a list that has no entry for one, or that is none."""
    assert stacked({"hidden_size": 4}, [0, 0])[1] == ["config.json names no number of layers; the result has 2"]
    with pytest.raises(StateMismatch, match="layer 5"):
        stacked({"num_hidden_layers": 2, "layer_types": ["a", "b"]}, [0, 5])
    with pytest.raises(StateMismatch, match="no JSON object"):
        stacked([], [0])


def test_dtype() -> None:
    made = ResultConfig(b'{"torch_dtype": "float32"}')
    made.set_dtype("bfloat16")
    assert json.loads(made.data) == {"torch_dtype": "bfloat16"} and len(made.notes) == 1
    other = ResultConfig(b"{}")
    other.set_dtype("bfloat16")
    assert (other.data, other.notes) == (b"{}", [])


def test_rows_and_ties() -> None:
    made = ResultConfig(b'{"vocab_size": 4, "tie_word_embeddings": true, "eos_token_id": 3}')
    made.set_rows(4)
    assert made.notes == []
    made.set_rows(8)
    made.set({"tie_word_embeddings": False})
    made.set_ids(b'{"eos_token_id": [5, 6], "bos_token_id": 1}', "other")
    wanted = {"vocab_size": 8, "tie_word_embeddings": False, "eos_token_id": [5, 6], "bos_token_id": 1}
    assert json.loads(made.data) == wanted and len(made.notes) == 3 and "other" in made.notes[-1]
    inner = ResultConfig(b'{"text_config": {"vocab_size": 4, "tie_word_embeddings": true}}')
    inner.set_rows(5)
    inner.set({"tie_word_embeddings": False})
    assert json.loads(inner.data) == {"text_config": {"vocab_size": 5, "tie_word_embeddings": False}}
