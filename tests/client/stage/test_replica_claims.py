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
from holdfast.stage.replica_claims import Claims, LiveSamples, Statement
from holdfast.stage.staging import SlotLayout, Spared
from holdfast.state.train_state import TrainState
from holdfast.tickets import SaveTicket
from holdfast_formats import digest
from holdfast_formats.errors import CheckpointError, ReplicasDiffer, RoundAborted, StateMismatch, TornSnapshot
from holdfast_formats.region import Box
from holdfast_formats.staging import replica_claims
from holdfast_formats.tensors import StagedFragment, TensorSpec

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
    says.look()
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


def live(size: int, seed: int = 0) -> Spared:
    octets = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, np.uint8))
    return Spared(
        f"t{seed}", octets, StagedFragment(TensorSpec("model", f"t{seed}", "U8", (size,)), (Box((0,), (size,)),), 0)
    )


@given(st.lists(st.integers(1, 300_000), min_size=1, max_size=4), st.integers(0, 2**40))
def test_live_samples_are_those_of_a_slot(sizes: list[int], step: int) -> None:
    """So a rank that stages a tensor and one that does not are compared, with the library or without it."""
    spared = [live(size, seed) for seed, size in enumerate(sizes)]
    expected = [replica_claims.sample(one.octets.numpy(), step) for one in spared]
    for library in (native_copy._library, None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native_copy, "_library", library)
            samples = LiveSamples(spared, step)
            samples.do()
            assert samples.values.tolist() == expected


def test_a_write_before_the_sample_is_torn() -> None:
    spared = [live(9, 0), live(9, 1)]
    samples = LiveSamples(spared, 1)
    spared[1].octets.add_(1)
    with pytest.raises(TornSnapshot, match="t1 changed"):
        samples.do()


SIDE = 300  # a square of floats is above `SPARED_BYTES_MIN`


def saved(says: Claims, state: dict[str, Any], step: int, error: CheckpointError | None, *spares: str) -> SlotLayout:
    """One save, and its outcome: the paths of tensors that another rank stages from now on."""
    says.look()
    snapshot = TrainState(state, 0, 2).snapshot()
    layout = staging.lay_out(snapshot, {}, lambda leaf, piece: True, spared=says.is_spared)
    ticket = SaveTicket("r", step, 1)
    statement = says.of(layout, ticket)
    assert statement is not None
    for turn in statement.turns:
        turn.do()
    rows = len(statement.digests(np.zeros(layout.data_bytes, np.uint8).data)) // replica_claims.ROW_BYTES
    assert rows == sum(len(fragment.boxes) for fragment in layout.fragments) + len(layout.spared)
    boxes = [leaf.path for leaf, f in zip(layout.leaves, layout.fragments, strict=True) for _ in f.boxes]
    ticket.spares = replica_claims.encode_bits(np.array([path in spares for path in boxes], np.bool_))
    ticket.end(error)
    return layout


def spared_in(layout: SlotLayout) -> set[str]:
    return {one.name for one in layout.spared}


def test_what_the_first_commit_spares_is_not_staged_any_more() -> None:
    """A failed save spares nothing, a later commit nothing of what was told before, and new tensors have their own first."""
    state: dict[str, Any] = {"model": {name: torch.ones(SIDE, SIDE) for name in "abc"}}
    says = Claims(state, 2)
    assert not spared_in(saved(says, state, 1, RoundAborted("gone"), "model/a"))
    assert not spared_in(saved(says, state, 2, None, "model/a"))
    state["model"]["d"] = torch.ones(SIDE, SIDE)
    assert spared_in(saved(says, state, 3, None, "model/b", "model/d")) == {"model/a"}
    assert spared_in(saved(says, state, 4, None)) == {"model/a", "model/d"}
    state["model"]["a"] = torch.ones(SIDE, SIDE).T.contiguous().T  # cannot be sampled where it is
    assert spared_in(saved(says, state, 5, ReplicasDiffer("they do"))) == {"model/d"}
    state["model"]["a"] = torch.ones(SIDE + 1, SIDE)  # another box
    assert spared_in(saved(says, state, 6, None)) == {"model/d"}


def test_a_save_that_lacked_a_part_ends_it_for_good() -> None:
    state: dict[str, Any] = {"model": {name: torch.ones(SIDE, SIDE) for name in "ab"}}
    says = Claims(state, 2)
    saved(says, state, 1, None, "model/a")
    assert spared_in(saved(says, state, 2, StateMismatch("left it to another rank"))) == {"model/a"}
    assert not spared_in(saved(says, state, 3, None))
    state["model"]["c"] = torch.ones(SIDE, SIDE)
    saved(says, state, 4, None, "model/c")
    assert not spared_in(saved(says, state, 5, None))


def test_beside_an_average_each_rank_stages_everything() -> None:
    state: dict[str, Any] = {"model": {"a": torch.ones(SIDE, SIDE)}}
    says = Claims(state, 2, spares=False)
    saved(says, state, 1, None, "model/a")
    assert not spared_in(saved(says, state, 2, None))
