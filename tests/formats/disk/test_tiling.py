"""tiling: refuses what a check of one tensor after the other refuses, and numbers that its columns cannot have."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats import dtypes
from holdfast_formats.disk import tiling
from holdfast_formats.disk.manifests import EXTENT_BYTES_MAX, Extent, FileEntry, TensorEntry
from holdfast_formats.errors import CorruptManifest
from holdfast_formats.tensors import TensorSpec
from tests.formats.strategies import manifest_of, sample_manifest, specs

Groups = dict[str, dict[str, TensorEntry]]
NUMBERS = st.sampled_from([-(2**70), -(2**63), -4, -1, 0, 1, 4, 2**24, 2**63 - 1, 2**63, 2**64, 2**70])


def tiles(files: Mapping[str, FileEntry], groups: Groups) -> bool:
    """Whether all extents and tensors follow each other, in Python's own numbers."""
    held: dict[str, list[tuple[int, int, str]]] = {name: [] for name, file in files.items() if file.header_bytes}
    for tensors in groups.values():
        for name, entry in tensors.items():
            size, end = prod(entry.shape) * dtypes.BITS[entry.dtype] // 8, 0
            for extent in entry.extents:
                if extent.offset != end or not 0 < extent.length <= EXTENT_BYTES_MAX:
                    return False
                if extent.length % (dtypes.BITS[entry.dtype] // 8):
                    return False
                end += extent.length
            if end != size or entry.file not in held:
                return False
            held[entry.file].append((entry.start, size, name))
    for file_name, placed in held.items():
        end = files[file_name].header_bytes
        for start, size, _ in sorted(placed):
            if start != end:
                return False
            end += size
        if end != files[file_name].bytes or len({name for *_, name in placed}) != len(placed):
            return False
    return True


def changed(draw: st.DrawFn, entry: TensorEntry) -> TensorEntry:
    """The entry with one of its numbers replaced, or moved a little."""
    which = draw(st.sampled_from(["start", "offset", "length", "shape", "drop"]))

    def other(number: int) -> int:
        return draw(st.one_of(st.just(number), NUMBERS, st.integers(-8, 8).map(lambda by: number + by)))

    if which == "start":
        return msgspec.structs.replace(entry, start=other(entry.start))
    if which == "shape":
        return msgspec.structs.replace(entry, shape=tuple(abs(other(side)) for side in entry.shape))
    if not entry.extents:
        return entry
    at = draw(st.integers(0, len(entry.extents) - 1))
    extents: list[Any] = list(entry.extents)
    if which == "drop":
        del extents[at]
    else:
        extents[at] = msgspec.structs.replace(extents[at], **{which: other(getattr(extents[at], which))})
    return msgspec.structs.replace(entry, extents=tuple(extents))


@st.composite
def manifests_with_errors(draw: st.DrawFn) -> tuple[dict[str, FileEntry], Groups]:
    """Files and tensors as saved, with up to two changes."""
    made = manifest_of(draw(specs()), draw(st.sampled_from([1, 64, 2**20])))
    files, groups = {file.name: file for file in made.files}, {group: dict(held) for group, held in made.tensors.items()}
    keys = [(group, name) for group, held in groups.items() for name in held]
    for group, name in draw(st.lists(st.sampled_from(keys), max_size=2)) if keys else ():
        groups[group][name] = changed(draw, groups[group][name])
    for name in draw(st.lists(st.sampled_from(sorted(files)), max_size=1)) if files else ():
        more = draw(st.integers(-4, 4))
        if files[name].header_bytes <= files[name].bytes + more:
            files[name] = msgspec.structs.replace(files[name], bytes=files[name].bytes + more)
    return files, groups


@given(manifests_with_errors())
def test_columns_refuse_what_one_check_after_the_other_refuses(made: tuple[dict[str, FileEntry], Groups]) -> None:
    """No hole, overlap or wrong end passes, wherever it is and however large its numbers are; nothing else is refused."""
    if tiles(*made):
        tiling.check(*made)
    else:
        with pytest.raises(CorruptManifest):
            tiling.check(*made)


@pytest.mark.parametrize("field", ["start", "extent", "shape"])
def test_numbers_over_64_bits_are_refused(field: str) -> None:
    """JSON may have them; a column cannot, and must not fold them into others."""
    made = sample_manifest()
    entry = made.tensors["model"]["a"]
    wrong = {
        "start": msgspec.structs.replace(entry, start=entry.start + 2**64),
        "extent": msgspec.structs.replace(entry, extents=(Extent(2**64, 24, "0" * 16), *entry.extents[1:])),
        "shape": msgspec.structs.replace(entry, shape=(2**62, 2**62)),
    }
    groups = {**made.tensors, "model": {**made.tensors["model"], "a": wrong[field]}}
    with pytest.raises(CorruptManifest, match="over 64 bits"):
        tiling.check({file.name: file for file in made.files}, groups)


def test_sums_over_64_bits_do_not_come_round() -> None:
    """Two tensors whose ends are equal only in 64 bits: the second seems to begin where the first ends."""
    header = 2**63 - 4
    extents = (Extent(0, 4, "0" * 16),)
    file = FileEntry("model.safetensors", 2**63 + 4, header, "0" * 16)
    entries = {name: TensorEntry("F32", (), file.name, start, extents) for name, start in (("a", header), ("b", -(2**63)))}
    with pytest.raises(CorruptManifest, match="begins at"):
        tiling.check({file.name: file}, {"model": entries})


def test_a_tensor_is_named_where_it_is_wrong() -> None:
    """Of many tensors of one shape, the one whose extents are short."""
    made = manifest_of([TensorSpec("model", f"t{number}", "F32", (4,)) for number in range(100)], 2**20)
    entries = dict(made.tensors["model"])
    entries["t37"] = msgspec.structs.replace(entries["t37"], extents=entries["t37"].extents[:1])
    with pytest.raises(CorruptManifest, match="'t37': extents cover 8 of 16 bytes"):
        tiling.check({file.name: file for file in made.files}, {"model": entries})
