"""Objects that have something under every name, as mocks and loggers of frameworks do: not taken for what they are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch

from holdfast import Checkpointer
from holdfast.state import assets, optimizer_wrappers
from holdfast_formats.errors import InvalidRequest


class Fluent:
    """Has a method under every name, each of which returns the object itself."""

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: self


EVERY = {"fluent": Fluent, "mock": Mock, "magic": MagicMock}


@pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)
def test_it_is_refused_in_a_state(make: Any, tmp_path: Path) -> None:
    """By name: it is no optimizer (a mock was looked through without end), and its state is no state."""
    assert not optimizer_wrappers.is_optimizer(make())
    with (
        Checkpointer("every", {"w": torch.ones(2), "x": make()}, at=tmp_path / "root") as checkpointer,
        pytest.raises(InvalidRequest, match=r"^x: a value of type .* cannot be stored"),
    ):
        checkpointer.save(1)


@pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)
def test_it_is_no_asset(make: Any) -> None:
    """Its save_pretrained() writes nothing, which would be a checkpoint without its config."""
    with pytest.raises(InvalidRequest, match=r"save_pretrained\(\) of the asset .* wrote no file"):
        assets.collect(make())
