"""Where NaN began, in the words that pages, commands and alerts share."""

from __future__ import annotations

import pytest

from holdfast_formats.rest.measurements import FirstNonFinite


@pytest.mark.parametrize(
    ("first", "kind", "place"),
    [
        (FirstNonFinite(step=120), "NaN", "first at step 120"),
        (
            FirstNonFinite(step=120, group="model", tensor="layers.2.mlp.up_proj", nan=1, inf=0, tensors=1),
            "NaN",
            "first at step 120, layers.2.mlp.up_proj, 1 value",
        ),
        (
            FirstNonFinite(step=0, group="optim", tensor="w", nan=0, inf=2, tensors=2),
            "infinite values",
            "first at step 0, w, 2 values, and 1 other tensor",
        ),
        (
            FirstNonFinite(step=7, group="model", tensor="w", nan=1, inf=2, tensors=4),
            "NaN",
            "first at step 7, w, 3 values, and 3 other tensors",
        ),
    ],
)
def test_where_nan_began(first: FirstNonFinite, kind: str, place: str) -> None:
    """The step; and of its first tensor the name and the count, if its event is kept."""
    assert (first.kind, first.place) == (kind, place)
