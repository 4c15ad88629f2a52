"""Names of a pipeline stage's tensors in the whole model."""

from __future__ import annotations

import pytest

from holdfast.integrations.paddle.fleet.names import numbered


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
