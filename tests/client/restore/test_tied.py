"""Tensors that were saved as two and share memory in the live state, through a Checkpointer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
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


class Transposed(nn.Module):
    """An autoencoder, whose decoder may have the encoder's weight as a view."""

    def __init__(self, tied: bool, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.encoder = nn.Parameter(torch.randn(3, 4))
        self.decoder = nn.Parameter(self.encoder.detach().t() if tied else torch.randn(4, 3))


def test_two_tensors_into_overlapping_memory_are_refused_unless_they_agree(tmp_path: Path) -> None:
    """A weight and its transpose: what was saved of two comes back into two, what was saved of one into either."""
    with running(tmp_path / "root") as daemon:
        for run, tied in (("two", False), ("one", True)):
            with Checkpointer(run, {"model": Transposed(tied, 1)}, at=daemon.socket) as checkpointer:
                checkpointer.save(1).result()
        live = Transposed(True, 2)
        before = live.encoder.detach().clone()
        with Checkpointer("two", {"model": live}, at=daemon.socket) as checkpointer:
            for options in ({}, {"strict": False}):
                with pytest.raises(StateMismatch, match=r"model/(decoder|encoder) overlaps model/(encoder|decoder)"):
                    checkpointer.restore(**options)  # type: ignore[arg-type]
            assert torch.equal(live.encoder, before)
        for other in (live, Transposed(False, 3)):
            with Checkpointer("one", {"model": other}, at=daemon.socket) as checkpointer:
                checkpointer.restore()
                assert torch.equal(other.encoder, Transposed(True, 1).encoder) and torch.equal(
                    other.decoder, other.encoder.t()
                )
