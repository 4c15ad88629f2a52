"""Samples and the names of what ranks have apart."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.staging import replica_claims


@given(st.integers(replica_claims.SAMPLE_BYTES + 1, 2**40), st.integers(0, 10**15))
def test_stretches_lie_in_the_box_apart_from_each_other(nbytes: int, step: int) -> None:
    """One in each sixteenth, so that no undeclared shard escapes."""
    places = replica_claims.places(nbytes, step)
    assert len(places) == replica_claims.STRETCHES and all(0 <= at <= nbytes - replica_claims.STRETCH_BYTES for at in places)
    assert all(b - a >= replica_claims.STRETCH_BYTES for a, b in pairwise(places))


def test_places_change_with_the_step() -> None:
    assert replica_claims.places(2**30, 1) != replica_claims.places(2**30, 2)


@given(st.integers(0, 10**6), st.sampled_from(["model", "extra", "ema_2"]), st.text(min_size=1))
def test_a_ranks_own_says_whose_and_what_it_is(rank: int, group: str, name: str) -> None:
    assert replica_claims.parse_apart(replica_claims.HOME, replica_claims.apart(rank, group, name)) == (rank, group, name)


@pytest.mark.parametrize(
    "name", ["w", "ranks/00001/rng/cpu", "ranks/1/$model/w", "ranks/00001/$Model/w", "x/ranks/00001/$model/w"]
)
def test_other_tensors_are_nobodys_own(name: str) -> None:
    assert replica_claims.parse_apart(replica_claims.HOME, name) is None
    assert replica_claims.parse_apart("model", replica_claims.apart(1, "model", "w")) is None


@given(st.lists(st.booleans(), max_size=40), st.integers(0, 60))
def test_bits_of_boxes_survive_as_text(bits: list[bool], boxes: int) -> None:
    """Missing ones are not set, and no bit says nothing."""
    text = replica_claims.encode_bits(np.array(bits, np.bool_))
    assert bool(text) == any(bits)
    assert replica_claims.decode_bits(text, boxes).tolist() == [*bits, *[False] * boxes][:boxes]
