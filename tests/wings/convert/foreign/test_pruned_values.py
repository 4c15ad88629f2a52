"""Keys of a pickled value are left out by their paths; the rest is the same, and so is the value itself."""

from __future__ import annotations

import argparse
import pickle
from typing import Any

import numpy as np
import pytest

from holdfast_formats.errors import LimitExceeded
from holdfast_formats.mapping.listing import PartLeftOut
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.wings.convert.foreign import pickles, pruned_values
from holdfast_service.wings.convert.foreign.pruned_values import PrunedValue
from tests.kit.files import FilesInMemory

VALUE = {"a": {"b": [1, {"c": 2, "d": 3}], "e": (4, 5)}, "args": argparse.Namespace(lr=1, cfg=2), 7: "seven"}


def pruned(value: Any, *patterns: str) -> PrunedValue:
    files = FilesInMemory({"f": pickle.dumps(value, 4)})
    return PrunedValue(pickles.read_pickle(files, "f", ("argparse.Namespace",)), ReadOptions(leave_out=patterns), "f")


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("a.b[1].c", {"b": [1, {"d": 3}], "e": (4, 5)}),
        ("a.b[0]", {"b": [{"c": 2, "d": 3}], "e": (4, 5)}),
        ("a.e[0]", {"b": VALUE["a"]["b"], "e": (5,)}),  # type: ignore[index]
        ("*.c", {"b": [1, {"d": 3}], "e": (4, 5)}),
    ],
)
def test_inner_keys(pattern: str, wanted: Any) -> None:
    """A path through dicts and lists, and the values beside it stay."""
    found = pruned(VALUE, pattern)
    assert found.value["a"] == wanted and found.value[7] == "seven"
    assert len(found.left_out) == 1


def test_fields_of_arguments() -> None:
    """A field of a program's arguments, and a key that is a number."""
    found = pruned(VALUE, "args.cfg", "7")
    assert found.value["args"].state == {"lr": 1} and 7 not in found.value
    assert {part.what for part in found.left_out} == {"args.cfg", "7"}


def test_what_it_counts() -> None:
    """The arrays below a key that is left out, with their bytes."""
    found = pruned({"s": [np.zeros(3, np.float32), {"t": (np.zeros((2, 2), np.int8),)}], "k": 1}, "s")
    assert found.value == {"k": 1} and found.left_out == (PartLeftOut("s", ("--leave-out s",), 2, 16),)


def test_nothing_to_leave_out() -> None:
    """Without patterns, and where none matches, it is the same value."""
    assert pruned(VALUE).left_out == () and pruned(VALUE, "z").left_out == ()
    value = pickles.read_pickle(FilesInMemory({"f": pickle.dumps({"a": [1]})}), "f")
    assert PrunedValue(value, ReadOptions(leave_out=("z",)), "f").value is value


def test_shared_parts_do_not_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that is named very often is not copied as often."""
    monkeypatch.setattr(pruned_values, "COPIED_MAX", 50)
    shared = {"x": 1, **{str(number): number for number in range(9)}}
    with pytest.raises(LimitExceeded, match="over 50 values beside those that are left out"):
        pruned({str(number): shared for number in range(9)}, "*.x")
