"""Names of a rank's tensors in the whole model."""

from __future__ import annotations

import pytest

from holdfast.integrations.paddle.fleet.names import LocalExperts, numbered, with_expert


@pytest.mark.parametrize(
    ("own", "stored"),
    [
        ("4.0.weight", "4.weight"),  # the first layer of the chunk that begins with layer 4
        ("4.3.mlp.0.weight", "7.mlp.0.weight"),
        ("0.embedding.weight", "shared_layers.embedding.weight"),
        ("shared_layers.embedding.weight", "shared_layers.embedding.weight"),
        ("4.weight", "4.weight"),
    ],
)
def test_layers_of_chunks_have_their_number_in_the_whole_list(own: str, stored: str) -> None:
    assert numbered(own, {"embedding": object()}) == stored


@pytest.mark.parametrize(
    ("own", "stored"),
    [
        ("moe.experts.1.up.weight", "moe.experts.5.up.weight"),
        ("other.experts.0.2.weight", "other.experts.6.2.weight"),
        ("moe.gate.weight", "moe.gate.weight"),
        ("more.moe.experts.1.up.weight", "more.moe.experts.1.up.weight"),
    ],
)
def test_experts_have_their_number_in_the_whole_model(own: str, stored: str) -> None:
    """That of the second of two ranks, which numbers its own from 0."""
    assert with_expert(own, [LocalExperts("moe.experts.", 4), LocalExperts("other.experts.", 6)]) == stored
