"""Random shapes, boxes, ragged grids and tensor tables, and a small manifest that every test may break."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod
from typing import Any

from hypothesis import strategies as st

from holdfast_formats import dtypes, naming
from holdfast_formats.digest import digest
from holdfast_formats.disk import index, packing, safetensors
from holdfast_formats.disk.manifests import Extent, FileEntry, Manifest, TensorEntry
from holdfast_formats.region import Box, Shape
from holdfast_formats.tensors import TensorSpec

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(lambda n: n != "__metadata__")
WHOLE_BYTE_DTYPES = [name for name, width in dtypes.BITS.items() if width % 8 == 0]


def shapes(max_dimensions: int = 4, max_side: int = 5) -> st.SearchStrategy[Shape]:
    return st.lists(st.integers(0, max_side), max_size=max_dimensions).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: Shape) -> Box:
    """Any box inside a tensor of this shape, empty ones too."""
    offset = tuple(draw(st.integers(0, size)) for size in shape)
    return Box(offset, tuple(draw(st.integers(0, size - o)) for o, size in zip(offset, shape, strict=True)))


@st.composite
def ragged_grids(draw: st.DrawFn, shape: Shape) -> list[Box]:
    """Boxes that tile the shape: every dimension is cut at random places, as uneven sharding does."""
    sides = []
    for size in shape:
        cuts = sorted([0, size, *draw(st.lists(st.integers(0, size), max_size=2))])
        sides.append(list(pairwise(cuts)))
    grid = [Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in product(*sides)]
    return draw(st.permutations(grid))


def shape_and_grid() -> st.SearchStrategy[tuple[Shape, list[Box]]]:
    return shapes().flatmap(lambda shape: st.tuples(st.just(shape), ragged_grids(shape)))


def shape_and_box() -> st.SearchStrategy[tuple[Shape, Box]]:
    return shapes().flatmap(lambda shape: st.tuples(st.just(shape), boxes_in(shape)))


@st.composite
def specs(draw: st.DrawFn) -> list[TensorSpec]:
    """Tensors with names that are different within their group."""
    keys = draw(st.lists(st.tuples(st.sampled_from(["model", "optim"]), NAMES), unique=True, max_size=8))
    choices = [(draw(st.sampled_from(WHOLE_BYTE_DTYPES)), draw(shapes(3, 4))) for _ in keys]
    return [TensorSpec(group, name, *choice) for (group, name), choice in zip(keys, choices, strict=True)]


def content(spec: TensorSpec) -> bytes:
    """Bytes that follow from the tensor alone and are valid for its dtype."""
    top = 2 if spec.dtype == "BOOL" else 120
    return bytes((len(spec.name) + 7 * i) % top for i in range(spec.nbytes))


def file_bytes(plan: packing.FilePlan) -> bytes:
    """The whole file that a plan stands for."""
    return plan.header + b"".join(content(spec) for spec, _ in plan.tensors)


def cut_extents(data: bytes, itemsize: int) -> tuple[Extent, ...]:
    """Two extents where the tensor has more than one element, else one or none."""
    middle = len(data) // itemsize // 2 * itemsize
    pieces = [(0, data[:middle]), (middle, data[middle:])]
    return tuple(Extent(at, len(piece), digest(piece)) for at, piece in pieces if piece)


def manifest_of(tensors: list[TensorSpec], file_bytes_max: int = 64, **changes: Any) -> Manifest:
    """The manifest of these tensors as if they had been saved."""
    plans = packing.pack(tensors, file_bytes_max)
    files = [FileEntry(p.name, p.bytes, len(p.header), digest(p.header)) for p in plans]
    entries: dict[str, dict[str, TensorEntry]] = {}
    for plan in plans:
        for spec, start in plan.tensors:
            extents = cut_extents(content(spec), dtypes.BITS[spec.dtype] // 8)
            entries.setdefault(spec.group, {})[spec.name] = TensorEntry(spec.dtype, spec.shape, plan.name, start, extents)
    for group in entries:
        encoded = index.encode(p for p in plans if p.group == group)
        files.append(FileEntry(naming.index_file_name(group), len(encoded), 0, digest(encoded)))
    values: dict[str, Any] = {
        "format": 1,
        "run": "run",
        "step": 500,
        "attempt": 2,
        "created": "2026-01-01T00:00:00Z",
        "world": 2,
        "mesh": {"dp": 2},
        "metrics": {"loss": 2.5},
        "files": tuple(files),
        "tensors": entries,
        "aliases": {},
    }
    return Manifest(**(values | changes))


SAMPLE_SPECS = [
    TensorSpec("model", "a", "F32", (4, 3)),
    TensorSpec("model", "b", "BF16", (5,)),
    TensorSpec("model", "empty", "F32", (0, 3)),
    TensorSpec("optim", "a", "F32", ()),
]


def sample_manifest() -> Manifest:
    """Two groups in three files, tensors with two, one and no extents, and an alias."""
    return manifest_of(SAMPLE_SPECS, aliases={"model": {"tied": "a"}})


def stored(*tensors: tuple[str, str, Shape]) -> list[safetensors.FileTensor]:
    """Stored tensors that follow each other."""
    end = 0
    listed = []
    for name, dtype, shape in tensors:
        start, end = end, end + dtypes.nbytes(dtype, prod(shape))
        listed.append(safetensors.FileTensor(name, dtype, shape, start, end))
    return listed
