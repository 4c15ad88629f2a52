"""The options of `Checkpointer`."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from holdfast import Checkpointer, ParallelLayout
from holdfast.checkpointer_options import declared_layout
from holdfast_formats.errors import InvalidRequest

OPTIONS_MAX = 11  # `info=` is the eleventh: only the trainer knows its config and owner, and it fits into no other option


def test_there_are_no_more_options_than_one_reads() -> None:
    """Eleven, all by name."""
    parameters = inspect.signature(Checkpointer).parameters.values()
    options = [one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]
    assert 0 < len(options) <= OPTIONS_MAX, options
    assert not [one for one in parameters if one.kind is inspect.Parameter.VAR_KEYWORD]


def test_a_layout_may_be_its_text_alone() -> None:
    """Rules and config are those of a `ParallelLayout`."""
    whole = ParallelLayout("tp=2", config={"model_type": "llama"})
    assert (declared_layout(None), declared_layout("tp=2"), declared_layout(whole)) == (None, ParallelLayout("tp=2"), whole)


@pytest.mark.parametrize(("wrong", "said"), [({"config": 3}, "config of a"), ({"rules": 3}, "rules of a")])
def test_rules_and_config_of_another_kind_are_refused(wrong: dict[str, Any], said: str) -> None:
    """When the Checkpointer is constructed, by their name."""
    with pytest.raises(InvalidRequest, match=said):
        Checkpointer("r", {"x": torch.ones(1)}, layout=ParallelLayout("tp=1", **wrong))
