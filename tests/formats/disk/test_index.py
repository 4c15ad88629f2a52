"""index: Hugging Face's index of one group's files."""

from __future__ import annotations

import json

from hypothesis import given

from holdfast_formats.disk import index, packing
from holdfast_formats.tensors import TensorSpec
from tests.formats.strategies import specs


@given(specs())
def test_index_names_every_tensors_file(tensors: list[TensorSpec]) -> None:
    """`weight_map` has each tensor once with the file that holds it, sorted; `total_size` counts tensor bytes only."""
    for group in {spec.group for spec in tensors}:
        plans = [plan for plan in packing.pack(tensors, 40) if plan.group == group]
        document = json.loads(index.encode(reversed(plans)))
        assert document == {
            "metadata": {"total_size": sum(s.nbytes for s in tensors if s.group == group)},
            "weight_map": {spec.name: plan.name for plan in plans for spec, _ in plan.tensors},
        }
        assert list(document["weight_map"]) == sorted(document["weight_map"])


def test_index_of_a_group_without_tensors() -> None:
    """A group that holds values only has an index too: an empty one, readable by people, ending in a newline."""
    assert index.encode([]) == b'{\n  "metadata": {\n    "total_size": 0\n  },\n  "weight_map": {}\n}\n'
