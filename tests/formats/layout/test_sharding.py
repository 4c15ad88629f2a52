"""Sharing out: every method gives back every element once, and cuts as the frameworks do."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.layout import parts
from holdfast_formats.layout.language import Layout, parse
from holdfast_formats.layout.parts import LocalTensor
from holdfast_formats.layout.sharding import ELEMENTS_MAX, Shard, cuts, take, unit
from holdfast_formats.region import Box, Shape
from holdfast_formats.tensors import TensorSpec
from tests.formats.strategies import shapes
from tests.local_tensors import fill, padded

METHODS = [
    "stage1",
    "stage2:whole:sort=none",
    "stage1:flat",
    "stage1:flat:align=4:bucket=9",
    "stage1:flat:align=3:pad=2:bucket=20",
    "stage3:flat:bucket=1",
    "stage3",
    "stage3:flat-param",
    "stage3:flat-param:align=4",
]
NAMES = ["embed", "layers.0.a", "layers.0.b.1.c", "layers.1.a", "h.10.a", "norm"]


@st.composite
def locals_and_sources(draw: st.DrawFn) -> tuple[list[LocalTensor], dict[str, np.ndarray]]:
    """What a tensor-parallel rank may hold: whole tensors, boxes, tensors of two parts, padded ones; no element is 0."""
    held: list[LocalTensor] = []
    sources: dict[str, np.ndarray] = {}
    drawn: list[Shape] = draw(st.lists(shapes(3, 5), max_size=6))
    for i, shape in enumerate(drawn):
        dtype = draw(st.sampled_from(["F32", "F64"]))
        name = f"{draw(st.sampled_from(NAMES))}.{i}"
        atoms = [f"{name}/{n}" for n in range(draw(st.integers(1, 2)) if shape else 1)]
        for atom in atoms:
            volume = prod(shape)
            sources[atom] = np.arange(1, volume + 1, dtype=np.float32).reshape(shape) + 1000 * len(sources)
        offset = tuple(draw(st.integers(0, n)) for n in shape)
        box = Box(offset, tuple(n - o for o, n in zip(offset, shape, strict=True)))
        tensor = parts.fuse(name, dtype, [(atom, box) for atom in atoms], 0, 1) if shape else parts.full(atoms[0], dtype, ())
        if shape and draw(st.booleans()):
            tensor = padded(tensor, tensor.shape[0] + draw(st.integers(0, 3)))
        held.append(tensor)
    return held, sources


def kept(tensors: Sequence[LocalTensor], layout: Layout, index: int, count: int) -> list[LocalTensor]:
    """What one of so many sharding ranks keeps."""
    return take(tensors, cuts(tensors, layout, count), index)


def content(tensor: LocalTensor, sources: dict[str, np.ndarray]) -> np.ndarray:
    return fill(tensor, sources or {"": np.zeros((), np.float32)}).ravel()


def layout_of(method: str, count: int) -> Layout:
    return parse(f"sharding={count}:{method}")


@pytest.mark.parametrize("method", METHODS)
@given(locals_and_sources(), st.integers(1, 7))
def test_all_shards_together_are_every_element_once(
    method: str, held_of: tuple[list[LocalTensor], dict[str, np.ndarray]], count: int
) -> None:
    """Put where their ranges say, the shards of all ranks make each tensor again, its padding too, and none twice.

    Only what has no dimension, cut by rows, and what has no elements is kept by every rank.
    """
    held, sources = held_of
    layout = layout_of(method, count)
    cut = cuts(held, layout, count)
    seen = [np.zeros(tensor.volume, np.int64) for tensor in held]
    again = [np.full(tensor.volume, -1, np.float32) for tensor in held]
    for index in range(count):
        shards = cut.of(index)
        taken = take(held, cut, index)
        for shard, tensor in zip(shards, taken, strict=True):
            source = held[shard.position]
            assert (tensor.name, tensor.dtype, tensor.volume) == (source.name, source.dtype, shard.stop - shard.start)
            assert tensor.volume or not source.volume
            seen[shard.position][shard.start : shard.stop] += 1
            again[shard.position][shard.start : shard.stop] = content(tensor, sources)
    for tensor, counted, made in zip(held, seen, again, strict=True):
        everywhere = method == "stage3" and not tensor.shape
        assert (counted == (count if everywhere else 1)).all()
        assert (made == content(tensor, sources)).all()


@given(locals_and_sources(), st.integers(1, 5), st.integers(1, 6), st.integers(0, 9), st.integers(0, 30))
def test_flat_buffers_are_cut_like_buffers_in_memory(
    held_of: tuple[list[LocalTensor], dict[str, np.ndarray]], count: int, align: int, pad: int, bucket: int
) -> None:
    """Against buffers that are built element by element, padded, and cut into equal shares."""
    held, _ = held_of
    layout = parse(f"sharding={count}:stage1:flat:align={align}:pad={pad}:bucket={bucket}")
    wanted: list[dict[int, list[int]]] = [{} for _ in range(count)]
    for buffer in naive_buffers(held, align, lcm(count, pad) if pad else count * align, bucket):
        length = len(buffer) // count
        for place, element in enumerate(buffer):
            if element is not None:
                wanted[place // length].setdefault(element[0], []).append(element[1])
    cut = cuts(held, layout, count)
    for index in range(count):
        kept = {shard.position: list(range(shard.start, shard.stop)) for shard in cut.of(index)}
        assert {position: elements for position, elements in kept.items() if elements} == wanted[index]


def naive_buffers(held: Sequence[LocalTensor], align: int, grain: int, bucket: int) -> list[list[tuple[int, int] | None]]:
    """Fused buffers as lists of (tensor, element), None where there is padding."""
    buffers: list[list[tuple[int, int] | None]] = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in held):
        buffers.append([])
        for position, tensor in enumerate(held):
            if tensor.dtype != dtype:
                continue
            if bucket and len(buffers[-1]) >= bucket:
                buffers.append([])
            buffers[-1] += [None] * (-len(buffers[-1]) % align)
            buffers[-1] += [(position, element) for element in range(tensor.volume)]
    return [buffer + [None] * (-len(buffer) % grain) for buffer in buffers if buffer]


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 5), st.booleans())
def test_whole_tensors_go_to_whom_has_the_least(sizes: list[int], count: int, sort: bool) -> None:
    """The greedy rule, said with lists: the largest first unless `sort=none`, to the lowest of the least loaded ranks."""
    tensors = [TensorSpec("model", f"t{i}", "F32" if i % 2 else "BF16", (size,)) for i, size in enumerate(sizes)]
    loads = [0] * count
    wanted: list[list[int]] = [[] for _ in range(count)]
    order = sorted(range(len(sizes)), key=lambda i: tensors[i].nbytes, reverse=True) if sort else range(len(sizes))
    for i in order:
        rank = loads.index(min(loads))
        loads[rank] += tensors[i].nbytes
        wanted[rank].append(i)
    cut = cuts(tensors, layout_of("stage1" if sort else "stage1:whole:sort=none", count), count)
    for rank in range(count):
        assert [s.position for s in cut.of(rank) if s.stop] == sorted(i for i in wanted[rank] if sizes[i])


@given(shapes(3, 9), st.integers(1, 6))
def test_rows_are_cut_as_torch_chunk_cuts_them(shape: tuple[int, ...], count: int) -> None:
    """Chunks of ⌈rows ÷ ranks⌉; the last ones may be shorter, or not exist."""
    tensor = parts.full("w", "F32", shape)
    rows = -(-shape[0] // count) if shape else 0
    for index in range(count):
        found = kept([tensor], layout_of("stage3", count), index, count)
        if not tensor.volume or not shape:
            assert found == [tensor]
            continue
        first, last = min(index * rows, shape[0]), min((index + 1) * rows, shape[0])
        assert [t.shape for t in found] == ([(last - first, *shape[1:])] if first < last else [])


def test_a_tensor_that_is_not_cut_keeps_its_parts() -> None:
    """One rank, or a row each: the very tensor, and rows as boxes."""
    tensor = parts.full("w", "F32", (4, 2))
    assert kept([tensor], layout_of("stage3", 1), 0, 1) == [tensor]
    assert kept([tensor], parse(""), 0, 1) == [tensor]
    (row,) = kept([tensor], layout_of("stage3", 4), 2, 4)
    assert row == parts.of_box("w", "F32", "w", Box((2, 0), (1, 2)))


def test_a_layer_is_a_unit_of_its_own() -> None:
    """FSDP1: each layer's parameters are one flat parameter, the rest is another; both are cut in two here."""
    shapes_of = {"embed": (2, 3), "layers.0.a": (4,), "layers.1.a": (3,), "layers.0.b": (2,), "norm": (2,)}
    tensors = [parts.full(name, "F32", shape) for name, shape in shapes_of.items()]
    cut = cuts(tensors, layout_of("stage3:flat-param", 2), 2)
    assert cut.of(0) == [Shard(0, 0, 4), Shard(1, 0, 3), Shard(2, 0, 2)]
    assert cut.of(1) == [Shard(0, 4, 6), Shard(1, 3, 4), Shard(2, 2, 3), Shard(3, 0, 2), Shard(4, 0, 2)]
    assert [unit(name) for name in ("embed", "layers.0.a", "0.weight", "x.12.experts.3.w", "layers.12")] == [
        "",
        "layers.0",
        "0",
        "x.12",
        "",
    ]


def test_megatrons_buffers() -> None:
    """align=64:pad=128: parameters at multiples of 64, a buffer's end at a multiple of 128 and of the ranks."""
    tensors = [TensorSpec("model", name, "F32", (size,)) for name, size in (("a", 70), ("b", 130), ("c", 10))]
    cut = cuts(tensors, parse("sharding=4:stage1:flat:align=64:pad=128"), 4)
    assert cut.at.tolist() == [0, 128, 320]
    assert cut.share.tolist() == [96, 96, 96]  # 330 elements are padded to 384
    assert cut.of(1) == [Shard(1, 0, 64)]
    bucketed = cuts(tensors, parse("sharding=4:stage1:flat:align=64:pad=128:bucket=100"), 4)
    assert (bucketed.at.tolist(), bucketed.share.tolist()) == ([0, 128, 0], [96, 96, 32])


def test_stage_zero_shares_out_nothing() -> None:
    """Every rank keeps everything, empty tensors too."""
    tensors = [parts.full("a", "F32", (3,)), parts.full("b", "F32", (0, 3)), parts.full("c", "F32", ())]
    for index in range(2):
        assert kept(tensors, parse("sharding=2:stage0"), index, 2) == tensors


def test_nothing_is_shared_out_among_nobody() -> None:
    """Ranks that do not exist, and more elements than can be counted, are refused by their numbers."""
    layout = layout_of("stage1", 2)
    with pytest.raises(InvalidRequest, match="sharding rank 2 is not one of 2"):
        cuts([], layout, 2).of(2)
    with pytest.raises(InvalidRequest, match="0 is not a number of sharding ranks"):
        cuts([], layout, 0)
    with pytest.raises(StateMismatch, match=f"{ELEMENTS_MAX + 1} elements are too many"):
        cuts([TensorSpec("model", "a", "F32", (ELEMENTS_MAX + 1,))], layout, 2)


@pytest.mark.parametrize("method", METHODS)
def test_thousands_of_tensors_for_a_thousand_ranks(method: str) -> None:
    """The ranges of all ranks are found without building a tensor, and are every element once."""
    rng = np.random.default_rng(0)
    sides = rng.integers(1, 300, (2000, 2)).tolist()
    tensors = [TensorSpec("model", f"layers.{i // 20}.x{i}", "F32", (a, b)) for i, (a, b) in enumerate(sides)]
    cut = cuts(tensors, layout_of(method, 1024), 1024)
    kept = np.zeros(len(tensors), np.int64)
    for index in range(1024):
        positions, starts, stops = cut.ranges(index)
        kept[positions] += stops - starts
    assert kept.tolist() == [a * b for a, b in sides]
