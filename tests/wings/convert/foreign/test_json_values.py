"""Values become the JSON that a trainer's library writes for them, and come back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.tensors import json_values as clients
from holdfast_formats.errors import CorruptManifest, InvalidRequest
from holdfast_service.wings.convert.foreign import json_values

ATOMS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
ATOMS |= st.sampled_from(["\ud800", "$keys", float("nan"), 2**70])
VALUES = st.recursive(
    ATOMS | st.sets(st.integers()) | st.frozensets(st.integers()),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=8,
)


def _refused(trail: json_values.Trail, value: Any) -> Any:
    raise InvalidRequest(f"{json_values.path_of(trail)}: {type(value).__name__}")


@given(VALUES)
def test_as_the_clients_own(value: Any) -> None:
    """Byte for byte its text, and its value again."""
    encoded = json_values.encode(value, _refused)
    text = clients.dumps(value, "x")
    assert json.dumps(encoded, sort_keys=True, allow_nan=False, separators=(",", ":")) == text
    assert repr(json_values.decode(json.loads(text), lambda kind, name: (kind, name))) == repr(clients.loads(text, "x"))


def test_others() -> None:
    """What is not plain goes to the caller with its path; references come back from it."""
    with pytest.raises(InvalidRequest, match=r"a\[1\]\.b: object"):
        json_values.encode({"a": [1, {"b": object()}]}, _refused)
    found = json_values.decode({"a": {"$tensor": "x/y"}, "b": [{"$array": "z"}]}, lambda kind, name: (kind, name))
    assert found == {"a": ("tensor", "x/y"), "b": [("array", "z")]}
    assert list(json_values.decode({"b": 1, "a": 2, "$keys": ["b", "a"]}, _refused)) == ["b", "a"]
    with pytest.raises(InvalidRequest, match=r"tag \$device"):
        json_values.decode({"$device": "cpu"}, _refused)
    for broken in ({"$int": "x"}, {"$bytes": "%"}, {"$tuple": 3}, {"$dict": [[1]]}):
        with pytest.raises(CorruptManifest, match="cannot read a value"):
            json_values.decode(broken, _refused)
    deep: Any = 1
    for _ in range(70):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="nested deeper"):
        json_values.encode(deep, _refused)
