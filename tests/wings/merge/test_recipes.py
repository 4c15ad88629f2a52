"""Recipes as they are published: each of `recipes/` runs unchanged, or is refused by the line to change.

They have the shapes of recipes in mergekit's repository and in model cards, with the models of `zoo`. The tensors that are
compared are mergekit's own results (`make_reference.py`); tests/integrations/mergekit compares all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast_formats.errors import InvalidRequest
from tests.daemon.copies_world import copies_world
from tests.wings.merge import zoo
from tests.wings.merge.published import DRAWN, RECIPES, REFERENCE, REFUSED, agrees, by_token, text_of
from tests.wings.merge.test_merge_jobs import MergeWorld

THERE = Path(__file__).parent


@pytest.fixture
def world(tmp_path: Path) -> Iterator[MergeWorld]:
    with copies_world(tmp_path, replicas=()) as made:
        for animal in zoo.ANIMALS:
            zoo.put(tmp_path / "place", animal)
        yield MergeWorld(made, tmp_path / "place")


def test_all_are_in_the_table() -> None:
    """At least twenty, and mergekit's results of those that draw nothing."""
    assert {*RECIPES, *REFUSED} == {file.stem for file in (THERE / "recipes").glob("*.yml")}
    assert len(RECIPES) - len(DRAWN) >= 9 and not {*RECIPES} & {*REFUSED}


@pytest.mark.parametrize("name", RECIPES)
def test_runs_unchanged(world: MergeWorld, name: str) -> None:
    """The result has as many layers and rows as its configuration says, and mergekit's values."""
    wanted = RECIPES[name]
    world.merge(text_of(name))
    found = world.arrays()
    config: dict[str, Any] = json.loads((world.path() / "config.json").read_text())
    assert (config["num_hidden_layers"], config["vocab_size"]) == (wanted.layers, wanted.rows)
    assert found["model.embed_tokens.weight"].shape[0] == wanted.rows
    assert "lm_head.weight" in found and config["tie_word_embeddings"] is False
    assert {int(key.split(".")[2]) for key in found if ".layers." in key} == set(range(wanted.layers))
    assert {str(array.dtype) for array in found.values()} == {config["torch_dtype"]}
    if name in DRAWN:
        return
    with np.load(REFERENCE) as reference:
        stored: dict[str, NDArray[Any]] = {
            key.removeprefix(f"{name}/"): reference[key] for key in reference.files if key.startswith(f"{name}/")
        }
    assert len(stored) > 4
    for key, array in stored.items():
        agrees(name, key, by_token(key, found[key], world.path()), array)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_the_line_to_change(world: MergeWorld, name: str) -> None:
    line, hint = REFUSED[name]
    with pytest.raises(InvalidRequest) as refused:
        world.merge(text_of(name), dry_run=True)
    assert hint in refused.value.hint
    assert line is None or (refused.value.members["line"] == line and f"line {line}:" in refused.value.detail)
