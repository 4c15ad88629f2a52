"""What a rank says of its bytes: the same by the library and by Python, and nothing where nothing need be said."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from holdfast.memory import native_copy
from holdfast.stage import staging
from holdfast.stage.replica_claims import Claims, Statement
from holdfast.state.train_state import TrainState
from holdfast.tickets import SaveTicket
from holdfast_formats import digest
from holdfast_formats.errors import RoundAborted
from holdfast_formats.staging import replica_claims

SIZES = st.one_of(st.integers(0, 300), st.integers(2**16 - 2, 2**16 + 2), st.integers(0, 300_000))


@given(st.lists(st.tuples(SIZES, st.booleans(), st.booleans()), max_size=5), st.integers(0, 2**40))
def test_both_ways_digest_alike(boxes: list[tuple[int, bool, bool]], step: int) -> None:
    """Short boxes and long ones, at any place, for any step."""
    places, end = [], 3
    for size, _, _ in boxes:
        places.append((end, size))
        end += size + 5
    data = np.random.default_rng(step).integers(0, 256, end, np.uint8)
    wanted = [np.array([box[i] for box in boxes], np.bool_) for i in (1, 2)]
    said = Statement(np.array(places, np.uint64).reshape(-1, 2), wanted[0], wanted[1], step)
    found = said.digests(data.data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_copy, "_library", None)
        assert said.digests(data.data) == found
    rows = np.frombuffer(found, "<u8").reshape(-1, 2)
    for (at, size), (_, sampled, entire), (sample, whole) in zip(places, boxes, rows.tolist(), strict=True):
        assert bool(sample) == (sampled and size > 0) and bool(whole) == (entire and size > 0)
        assert not whole or whole == digest.number(data[at : at + size])
        assert not sample or size > replica_claims.SAMPLE_BYTES or sample == digest.number(data[at : at + size])


def said(says: Claims, state: dict[str, Any], step: int) -> tuple[SaveTicket, dict[str, tuple[bool, bool]]]:
    """What is said of each tensor: whether a sample, and whether all."""
    snapshot = TrainState(state, 0, 2).snapshot()
    layout = staging.lay_out(snapshot, {}, lambda leaf, piece: True)
    ticket = SaveTicket("r", step, 1)
    statement = says.of(layout, ticket)
    assert statement is not None
    rows = np.frombuffer(statement.digests(np.zeros(layout.data_bytes, np.uint8).data), "<u8").reshape(-1, 2) != 0
    paths = [leaf.path for leaf in layout.leaves for _ in leaf.pieces]
    return ticket, {path: (bool(a), bool(b)) for path, (a, b) in zip(paths, rows.tolist(), strict=True)}


def test_all_is_digested_until_a_save_was_committed() -> None:
    """Claims: whole and a sample, then a sample. Buffers and `extra`: whole, always. Random streams: nothing."""
    state = {"model": nn.BatchNorm1d(4), "mine": {"x": torch.ones(2)}}
    says = Claims(state, 2)
    for step in (1, 2):  # the first one fails
        ticket, found = said(says, state, step)
        assert found["model/weight"] == found["model/bias"] == (True, True)
        assert found["model/running_mean"] == found["extra/mine/x"] == (False, True)
        assert not any(any(kinds) for path, kinds in found.items() if path.startswith("extra/ranks/"))
        ticket.end(RoundAborted("another rank was gone") if step == 1 else None)
    _, found = said(says, state, 3)
    assert found["model/weight"] == (True, False) and found["model/running_mean"] == (False, True)
    state["master"] = {"weight": torch.ones(4)}
    _, found = said(says, state, 4)
    assert found["master/weight"] == (True, True) and found["model/weight"] == (True, False)


def test_a_rank_alone_says_nothing() -> None:
    state = {"model": nn.Linear(2, 2)}
    layout = staging.lay_out(TrainState(state, 0, 1).snapshot(), {}, lambda leaf, piece: True)
    assert Claims(state, 1).of(layout, SaveTicket("r", 1, 1)) is None
