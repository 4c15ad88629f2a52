"""statistics: parts become tensors, tensors become columns, columns become bytes and come back, layers sum up."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.disk.manifests import Extent, FileEntry, Manifest, TensorEntry
from holdfast_formats.errors import CorruptStatistics
from holdfast_formats.rest import statistics
from holdfast_formats.rest.statistics import (
    LAYERS_MAX,
    NOWHERE,
    OTHERS,
    PartStatistics,
    Statistics,
    collect,
    decode,
    encode,
    layer_of,
    layers_of,
    listed,
    merge,
    merge_each,
    sum_up,
    tabulate,
)

FINITE = st.floats(-1e6, 1e6)
PARTS = st.builds(
    lambda values, nan, inf, change: PartStatistics(
        len(values),
        nan,
        inf,
        values.count(0.0),
        min(values, default=math.inf),
        max(values, default=-math.inf),
        math.fsum(values) / len(values) if values else 0.0,
        math.sqrt(math.fsum(v * v for v in values)),
        change,
    ),
    st.lists(FINITE, max_size=5),
    st.integers(0, 3),
    st.integers(0, 3),
    st.none() | st.floats(0, 1e6),
)


def manifest(tensors: dict[str, dict[str, tuple[int, ...]]]) -> Manifest:
    """A manifest of F32 tensors of these shapes; only what statistics look at is right."""
    entries = {
        group: {name: TensorEntry("F32", shape, "f", 0, (Extent(0, 4, "0" * 16),)) for name, shape in held.items()}
        for group, held in tensors.items()
    }
    return Manifest(1, "r", 1, 1, "now", 1, {}, {}, (FileEntry("f", 1, 1, "0" * 16),), entries, {})


def collected(rows: Sequence[tuple[PartStatistics, int | None]]) -> Statistics:
    steps = [NOWHERE if step is None else step for _, step in rows]
    return collect(tabulate([part for part, _ in rows]), np.array(steps, np.int64))


def same(one: Statistics, other: Statistics) -> bool:
    return all(np.array_equal(one[name], other[name], equal_nan=True) for name in one.columns)


@given(st.lists(st.tuples(PARTS, st.none() | st.integers(0, 2**53)), max_size=8))
def test_columns_come_back(rows: list[tuple[PartStatistics, int | None]]) -> None:
    """What is encoded is decoded, whatever is in it."""
    found = collected(rows)
    back = decode(encode(found), len(rows))
    assert same(found, back)
    assert len(back) == len(rows)
    assert back.nonfinite.tolist() == [part.nan + part.inf for part, _ in rows]


def row(part: PartStatistics, step: int | None) -> tuple[float, ...]:
    """The columns of one tensor, as they are defined."""
    known = part.finite > 0
    rms = part.norm / math.sqrt(part.finite) if known and math.isfinite(part.norm) else math.nan
    change = part.change if step is not None and part.change is not None else math.nan
    change = change if math.isfinite(change) else math.nan
    moments = (part.minimum, part.maximum, part.mean) if known else (math.nan,) * 3
    return (part.nan, part.inf, part.zeros, *moments, rms, change, NOWHERE if step is None or math.isnan(change) else step)


@given(st.lists(st.tuples(PARTS, st.none() | st.integers(0, 2**53)), max_size=8))
def test_columns_are_those_of_each_tensor(rows: list[tuple[PartStatistics, int | None]]) -> None:
    """To the last bit."""
    found = collected(rows)
    columns = [found[name].tolist() for name in found.columns]
    assert repr(list(map(tuple, zip(*columns, strict=True)))) == repr([row(part, step) for part, step in rows])


@given(st.lists(st.lists(PARTS, max_size=3), max_size=8))
def test_tensors_are_merged_each(tensors: list[list[PartStatistics]]) -> None:
    """Of a table of all parts, whichever number of them a tensor has."""
    parts = [part for tensor in tensors for part in tensor]
    edges = np.cumsum([0, *map(len, tensors)])
    assert listed(tabulate(parts)) == parts
    assert listed(merge_each(tabulate(parts), edges)) == [merge(tensor) for tensor in tensors]


@given(st.lists(PARTS, max_size=6))
def test_parts_together_are_the_whole(parts: list[PartStatistics]) -> None:
    """Counts are sums, extremes the outermost, moments those of all elements, in any order."""
    whole = merge(parts)
    assert whole[:4] == tuple(sum(part[i] for part in parts) for i in range(4))
    assert whole.minimum == min((p.minimum for p in parts), default=math.inf)
    assert whole.maximum == max((p.maximum for p in parts), default=-math.inf)
    total = math.fsum(p.mean * p.finite for p in parts)
    assert whole.mean * whole.finite == pytest.approx(total, rel=1e-9, abs=1e-6)
    assert whole.norm == pytest.approx(math.sqrt(math.fsum(p.norm**2 for p in parts)))
    changes = [p.change for p in parts]
    assert (whole.change is None) == (None in changes)
    turned = merge(parts[::-1])
    assert turned[:7] == whole[:7]
    assert turned[7:] == (pytest.approx(whole.norm), None if whole.change is None else pytest.approx(whole.change))


def test_what_there_is_not_is_none() -> None:
    """A tensor without finite elements has no moments, one without a predecessor no change, and nothing is infinite."""
    huge = PartStatistics(2, 0, 0, 0, 1e308, 1.7e308, 1.5e308, math.inf, math.inf)
    found = collected(
        [
            (PartStatistics(0, 3, 1, 0, change=None), 4),
            (PartStatistics(2, 0, 0, 1, 0.0, 4.0, 2.0, 4.0, 3.0), None),
            (huge, 4),
        ]
    )
    made = manifest({"model": {"a": (4,), "b": (2,), "c": (2,)}, "extra": {}})
    tensors = statistics.tensors_of(made)
    first, second, third = (statistics.describe(found, i, *tensor) for i, tensor in enumerate(tensors))
    assert (first.nan, first.inf, first.minimum, first.maximum, first.mean, first.rms) == (3, 1, None, None, None, None)
    assert (first.change, first.changed_from) == (None, None)
    assert (second.zeros, second.rms, second.elements) == (0.5, pytest.approx(math.sqrt(8)), 2)
    assert (second.change, second.changed_from) == (None, None)
    assert (third.rms, third.change, third.changed_from, third.maximum) == (None, None, None, 1.7e308)
    assert same(decode(encode(found), 3), found)


def test_an_empty_tensor() -> None:
    """Nothing of nothing."""
    found = collected([(merge([]), 4)])
    described = statistics.describe(found, 0, "model", "a", manifest({"model": {"a": (0, 5)}}).tensors["model"]["a"])
    assert (described.elements, described.zeros, described.minimum, described.change) == (0, 0.0, None, 0.0)


def test_damage_is_named() -> None:
    """Any flipped bit, any cut, another number of tensors and any other bytes are refused by name."""
    found = collected([(PartStatistics(4, 0, 0, 1, -1.0, 2.0, 0.5, 3.0, 0.25), 3)] * 20)
    encoded = encode(found)
    for at in range(len(encoded)):
        broken = bytearray(encoded)
        broken[at] ^= 1 << at % 8
        try:
            assert same(decode(bytes(broken), 20), found)  # a bit of the frame that says nothing
        except CorruptStatistics:
            continue
    for wrong in (encoded[:-1], encoded[:10], b"", b"\0" * 100):
        with pytest.raises(CorruptStatistics):
            decode(wrong, 20)
    with pytest.raises(CorruptStatistics):
        decode(encoded, 21)


def test_what_nobody_wrote_is_refused() -> None:
    """An intact frame with another head, or with numbers that no tensor has."""
    found = collected([(PartStatistics(4, 0, 0, 1, -1.0, 2.0, 0.5, 3.0, 0.25), 3)])
    plain = zstandard.ZstdDecompressor().decompress(encode(found))
    with pytest.raises(CorruptStatistics):
        decode(zstandard.ZstdCompressor().compress(b"XXXX" + plain[4:]), 1)
    wrong = [("nan", -1), ("minimum", 3.0), ("rms", math.inf), ("rms", -1.0), ("change", -1.0), ("changed_from", -2)]
    for column, value in wrong:
        columns = dict(found.columns)
        columns[column] = np.array([value], columns[column].dtype)
        with pytest.raises(CorruptStatistics):
            decode(encode(Statistics(columns)), 1)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.11.mlp.up.weight", "model.layers.11"),
        ("model.layers.3.experts.17.w1.weight/exp_avg", "model.layers.3"),
        ("lm_head.weight", "lm_head"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("a.b.c.d", "a.b"),
        ("scale", "scale"),
        ("0.weight", "0"),
    ],
)
def test_layers_are_named(name: str, layer: str) -> None:
    """Up to the first number; else without the last part, and two parts at most."""
    assert layer_of(name) == layer


@given(st.lists(st.lists(st.sampled_from(["a", "b", "1", "12", "b/c", "", "²"]), min_size=1, max_size=4).map(".".join)))
def test_layers_of_many(names: list[str]) -> None:
    """Each is that of its name, whatever stands before it."""
    assert list(layers_of(names)) == [layer_of(name) for name in names]


def test_layers_sum_up() -> None:
    """Norms and changes over all tensors of a layer, counters left out; broken tensors by name."""
    made = manifest({"model": {"l.0.a": (2,), "l.0.b": (3,), "l.0.step": (), "l.1.a": (2,), "head": (2,)}})
    parts = [
        PartStatistics(2, 0, 0, 0, 1.0, 2.0, 1.5, 3.0, 0.3),
        PartStatistics(3, 0, 0, 0, 1.0, 2.0, 1.5, 4.0, 0.4),
        PartStatistics(1, 0, 0, 0, 500.0, 500.0, 500.0, 500.0, 1.0),
        PartStatistics(0, 2, 0, 0, change=0.0),
        PartStatistics(2, 0, 0, 2, 0.0, 0.0, 0.0, 0.0, 0.0),
    ]
    found = sum_up(made, collected([(part, 1) for part in parts]))
    assert list(found["groups"]["model"]) == ["head", "l.0", "l.1"]
    assert found["groups"]["model"]["l.0"] == [0, pytest.approx(5 / math.sqrt(5)), pytest.approx(0.1)]
    assert found["groups"]["model"]["l.1"] == [2, None, None]
    assert found["groups"]["model"]["head"] == [0, 0.0, None]
    assert found["nonfinite"] == {"model": {"l.1.a": [2, 0]}}


def test_layers_are_bounded() -> None:
    """Of names that are no layers, those beyond the limit are one."""
    made = manifest({"model": {f"t{i}": (1,) for i in range(LAYERS_MAX + 9)}})
    found = sum_up(made, collected([(PartStatistics(1, 0, 0, 0, 1.0, 1.0, 1.0, 1.0, None), None)] * (LAYERS_MAX + 9)))
    cells = found["groups"]["model"]
    assert len(cells) == LAYERS_MAX + 1
    assert cells[OTHERS] == [0, 1.0, None]
