"""Tensors that were saved as two and are one tensor in the live state, through a Checkpointer."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from holdfast import Checkpointer, LeftOutWarning
from holdfast_formats.errors import StateMismatch
from tests.daemons import running


class Pair(nn.Module):
    """Two layers, which may share their weight."""

    def __init__(self, tied: bool, values: tuple[float, float] = (0.0, 0.0)) -> None:
        super().__init__()
        self.e, self.f = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        for layer, value in zip((self.e, self.f), values, strict=True):
            nn.init.constant_(layer.weight, value)
        if tied:
            self.f.weight = self.e.weight


def test_two_tensors_into_one_are_refused_unless_allowed(tmp_path: Path) -> None:
    """By name, before anything changes; `exclude=` says which one is not used; equal ones are one."""
    with running(tmp_path / "root") as daemon:
        with Checkpointer("differ", {"model": Pair(False, (1.0, 2.0))}, at=daemon.socket) as checkpointer:
            checkpointer.save(1).result()
        with Checkpointer("equal", {"model": Pair(False, (3.0, 3.0))}, at=daemon.socket) as checkpointer:
            checkpointer.save(1).result()
        live = Pair(True)
        with Checkpointer("differ", {"model": live}, at=daemon.socket) as checkpointer:
            with pytest.raises(StateMismatch, match=r"model/f\.weight is model/e\.weight here"):
                checkpointer.restore()
            assert live.e.weight.eq(0).all()
            with pytest.warns(LeftOutWarning, match=r"f\.weight"):
                checkpointer.restore(exclude=("model/f.weight",))
            assert live.e.weight.eq(1).all()
        with Checkpointer("equal", {"model": live}, at=daemon.socket) as checkpointer:
            checkpointer.restore()
            assert checkpointer.notices == ()
            assert live.e.weight.eq(3).all()
