"""Whether boxes are all of a tensor: what tests ask of plans, placements and parts."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from holdfast_formats.region import Box, Shape, check_box, first_overlap


def tiles(boxes: Sequence[Box], shape: Shape) -> bool:
    """Whether the boxes cover a tensor of `shape` exactly: inside it, no hole, no overlap. Empty boxes do not count."""
    solid = [box for box in boxes if box.volume]
    for box in solid:
        check_box(box, shape)
    return sum(box.volume for box in solid) == prod(shape) and first_overlap(solid) is None
