"""Nested Python values as JSON and back."""

from __future__ import annotations

import io
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import IntEnum

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.tensors.json_values import DEPTH_MAX, dumps, loads, referred
from holdfast_formats.disk import state_json
from holdfast_formats.errors import CorruptManifest, InvalidRequest, LimitExceeded
from holdfast_service.wings.convert.foreign.json_values import decode as plain


class Colour(IntEnum):
    RED = 1


Pair = namedtuple("Pair", "a b")


def through(value):
    """There and back by way of state.json, as a checkpoint does it."""
    text = dumps(value, "v")
    merged = state_json.merge(1, {}, ["extra"], {0: {"extra": {"v": text}}})
    return loads(state_json.for_rank(merged, 0).values["extra"]["v"], "v")


def same(a, b):
    """Equal in type, order and every bit of every float."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float | np.floating):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, complex | np.complexfloating):
        return same(float(a.real), float(b.real)) and same(float(a.imag), float(b.imag))
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(
            same(x, y) for x, y in zip(a.values(), b.values(), strict=True)
        )
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(2**63) - 1,
        2**200_00,
        1.5,
        -0.0,
        5e-324,
        math.inf,
        -math.inf,
        math.nan,
        struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0],
        "text",
        "nul\0 and \ud800 alone",
        b"\x00\xff",
        bytearray(b"ab"),
        complex(1, -0.0),
        range(3, 9, 2),
        [1, [2, (3, ())], {}],
        [1, True, None, 2**70],
        {"b": 1, "a": 2},
        {"$tuple": [1]},
        {"$keys": 1, "a": 2},
        {1: "int", "1": "text", (1, 2): "tuple", None: 0, 1.5: 1},
        {"\ud800": 1},
        OrderedDict([("z", 1), ("a", [OrderedDict()])]),
        Counter({"x": 3, 5: 1}),
        defaultdict(list, {"k": [1]}),
        defaultdict(None, {1: 2}),
        deque([1, (2,)], maxlen=5),
        torch.bfloat16,
        torch.device("cuda:1"),
        torch.Size([2, 3]),
        np.float32(0.1),
        np.int64(-5),
        np.bool_(True),
        np.complex64(1 + 2j),
        np.float64(math.nan),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_come_back_exactly(value):
    """Type, order and bits of every supported value survive state.json."""
    assert same(through(value), value)


def test_sets_come_back_and_have_one_text():
    """Sets are equal again, and their text does not depend on their order."""
    value = {frozenset({1, "a"}), (1, 2), None, 1.5}
    assert through(value) == value
    assert through(frozenset(value)) == value
    assert dumps({"x", "y", "z"}, "v") == dumps({"z", "y", "x"}, "v")


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(st.characters())
        | st.binary()
        | st.complex_numbers(),
        lambda inner: (
            st.lists(inner)
            | st.lists(inner).map(tuple)
            | st.dictionaries(st.text() | st.integers() | st.just("$set"), inner)
        ),
        max_leaves=25,
    )
)
def test_any_nested_value_comes_back(value):
    """Whatever is nested out of plain types comes back exactly."""
    assert same(through(value), value)


def test_a_stream_of_bytes_comes_back_with_its_position():
    """Where an object returned it; an entry of the state itself would keep the stream that it has."""
    stream = io.BytesIO(b"\x00\xffabc")
    stream.seek(2)
    text = dumps({"s": stream}, "v", inside=True)
    found = loads(text, "v")["s"]
    assert type(found) is io.BytesIO and (found.getvalue(), found.tell()) == (b"\x00\xffabc", 2)
    assert plain(json.loads(text), lambda kind, name: None) == {"s": b"\x00\xffabc"}
    with pytest.raises(InvalidRequest, match=r"v\.s: a value of type _io.BytesIO"):
        dumps({"s": stream}, "v")
    stream.close()
    with pytest.raises(InvalidRequest, match=r"v\.s: a value of type _io.BytesIO"):
        dumps({"s": stream}, "v", inside=True)


def test_text_is_plain_json_where_it_can_be():
    """Ordinary dicts stay readable; an unsorted order is kept by a list of keys."""
    assert json.loads(dumps({"lr": 0.1, "name": "x"}, "v")) == {"lr": 0.1, "name": "x"}
    assert json.loads(dumps({"b": 1, "a": 2}, "v")) == {"a": 2, "b": 1, "$keys": ["b", "a"]}


@pytest.mark.parametrize(
    ("value", "path", "kind"),
    [
        ({"sampler": {"fn": len}}, r"loader\.sampler\.fn", "builtin_function_or_method"),
        ({"a": [0, lambda: 0]}, r"loader\.a\[1\]", "function"),
        (Colour.RED, "loader", "Colour"),
        (Pair(1, 2), "loader", "Pair"),
        ([object()], r"loader\[0\]", "object"),
        ({"t": torch.zeros(1)}, r"loader\.t", "torch.Tensor"),
        ({"a": np.str_("x")}, r"loader\.a", "numpy.str_"),
        (np.datetime64("2020-01-01"), "loader", "numpy.datetime64"),
        (defaultdict(lambda: 0), r"loader\.default_factory", "function"),
        (np.ma.masked_array([1], [True]), "loader", "MaskedArray"),
    ],
)
def test_what_has_no_json_is_refused_by_path_and_type(value, path, kind):
    """Functions, enums, named tuples and objects are refused; the message says where and what."""
    with pytest.raises(InvalidRequest, match=f"^{path}: a value of type .*{kind}") as caught:
        dumps(value, "loader")
    assert caught.value.hint


def test_cycles_and_depth_are_refused():
    """A value that contains itself, or is nested too deeply, is a named error and no crash."""
    cycle: list = [1]
    cycle.append({"back": cycle})
    with pytest.raises(InvalidRequest, match=r"v\[1\]\.back contains itself"):
        dumps(cycle, "v")
    shared = [1]
    assert through([shared, shared]) == [[1], [1]]
    nested: list = []
    for _ in range(DEPTH_MAX - 1):
        nested = [nested]
    assert through(nested) == nested
    with pytest.raises(LimitExceeded, match="nested deeper"):
        dumps([nested], "v")


def test_text_beyond_the_limit_is_refused(monkeypatch):
    """A value whose JSON would be huge is refused by its path, with a hint to use tensors."""
    monkeypatch.setattr("holdfast.tensors.json_values.TEXT_BYTES_MAX", 10)
    with pytest.raises(LimitExceeded, match=r"^loader: .*over 10"):
        dumps("x" * 11, "loader")


@pytest.mark.parametrize(
    "text",
    ["{", '{"$nothing":1}', '{"$int":"x"}', '{"$bytes":"*"}', '{"$tuple":5}', '{"$dtype":"nn"}', '{"$scalar":["O",""]}',
     '{"$defaultdict":["eval",[]]}', '{"$tensor":"a"}', '{"$device":7.5}', '{"$keys":["a"]}'],
)  # fmt: skip
def test_text_that_we_did_not_write_is_refused(text):
    """A damaged or foreign document is a named error, and nothing in it is executed."""
    with pytest.raises(CorruptManifest, match="stored value of v"):
        loads(text, "v")


def test_tensors_stand_beside_the_document():
    """With a place for them, tensors and arrays leave a reference and come back through it."""
    beside = {}

    def place(trail, value):
        beside["/".join(trail)] = value
        return "/".join(trail)

    value = {"a": torch.ones(2), "b": [np.arange(3)]}
    text = dumps(value, "v", place)
    assert referred(text) == {"a": "tensor", "b/[0]": "array"}
    back = loads(text, "v", lambda kind, name: beside[name])
    assert back["a"] is value["a"] and back["b"][0] is value["b"][0]
