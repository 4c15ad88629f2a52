"""Nested values as texts by their paths."""

from __future__ import annotations

from holdfast_formats.rest.flat_values import flat


def test_values_are_found_by_the_names_that_lead_to_them() -> None:
    config = {"optim": {"lr": 3e-4, "name": "adamw"}, "layers": [1, 2], "tied": None, "none": {}}
    assert flat(config) == {"optim.lr": "0.0003", "optim.name": "adamw", "layers": "[1, 2]", "tied": "null"}
    assert flat(7, "x") == {"x": "7"}
