"""Extents proven by one call: all of them at their places, or whoever asked looks again; nothing unproven in any place."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.memory import native_copy
from holdfast.read.reader import CheckpointReader
from holdfast.read.sources import DirectorySource
from holdfast_formats import digest
from holdfast_formats.disk.manifests import Extent
from holdfast_formats.errors import CorruptExtent
from holdfast_formats.region import whole
from tests.checkpoints import Built, build, flip
from tests.client.read.test_reader import want

LENGTHS = st.lists(st.integers(1, 20_000), min_size=1, max_size=8)

pytestmark = pytest.mark.skipif(not native_copy.can_verify(), reason="the library was not built here, or hides its digest")


def made(lengths: list[int], seed: int) -> tuple[np.ndarray, list[Extent]]:
    """Random bytes, and the extents of these lengths in them."""
    data = np.random.default_rng(seed).integers(0, 256, sum(lengths), np.uint8)
    offsets = np.cumsum([0, *lengths[:-1]]).tolist()
    return data, [Extent(at, n, digest.digest(data[at : at + n])) for at, n in zip(offsets, lengths, strict=True)]


def from_file(extents: native_copy.Extents, data: np.ndarray, path: Path) -> bool:
    path.write_bytes(b"before" + data.tobytes() + b"behind")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return extents.take_from(descriptor, 6)
    finally:
        os.close(descriptor)


@given(LENGTHS, st.data(), st.booleans())
def test_all_arrive_or_those_before_the_damage(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], draw: st.DataObject, file: bool
) -> None:
    """Of any length, together or apart; one wrong bit, and its extent is at most where it was read, a later one nowhere."""
    data, extents = made(lengths, draw.draw(st.integers(0, 2**31)))
    cut = draw.draw(st.integers(1, len(extents)))
    nowhere = not file and draw.draw(st.booleans())  # the first ones are proven alone
    split = extents[cut].offset if cut < len(extents) else len(data)
    target, kept = np.zeros(len(data) - split, np.uint8), np.zeros(split, np.uint8)
    asked = native_copy.Extents()
    asked.add(extents[:cut], None if nowhere else kept.data)
    asked.add(extents[cut:], target.data)
    bad = draw.draw(st.none() | st.integers(0, len(data) - 1))
    given_bytes = data.copy()
    if bad is not None:
        given_bytes[bad] ^= 1 << draw.draw(st.integers(0, 7))
    if file:
        path = tmp_path_factory.mktemp("proving") / "f"
        assert from_file(asked, given_bytes, path) is (bad is None)
    else:
        assert asked.take(given_bytes.data) is (bad is None)
    wrong = next((e for e in extents if bad is not None and bad < e.offset + e.length), None)
    good = len(data) if wrong is None else wrong.offset
    expected = np.concatenate([np.zeros(split, np.uint8) if nowhere else data[:split], data[split:]])
    expected[good:] = 0
    if file and wrong is not None:
        expected[good : good + wrong.length] = given_bytes[good : good + wrong.length]
    assert np.array_equal(np.concatenate([kept, target]), expected)


def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    data, extents = made([5000, 300], 1)
    for into in (np.zeros(5299, np.uint8).data, np.zeros(5301, np.uint8).data, np.zeros(5300, np.uint8).data.toreadonly()):
        with pytest.raises(ValueError, match="do not match a target"):
            native_copy.Extents().add(extents, into)
    target = np.zeros(5300, np.uint8)
    asked = native_copy.Extents()
    asked.add(extents, target.data)
    assert not asked.take(data[:-1].data) and not asked.take(np.append(data, data).data)
    assert not asked.take_from(-1, 0), "no file"
    assert not target.any()
    alone = native_copy.Extents()
    alone.add(extents, None)
    assert alone.take(data.data) and not from_file(alone, data, tmp_path / "f"), "it has no place"
    (tmp_path / "short").write_bytes(data[:-1].tobytes())
    with open(tmp_path / "short", "rb") as short:
        assert not asked.take_from(short.fileno(), 0)
    assert np.array_equal(target[:5000], data[:5000]) and target[-1] == 0


@pytest.fixture
def large(tmp_path: Path) -> Built:
    rng = np.random.default_rng(8)
    arrays = {name: rng.standard_normal((300, 999)).astype(np.float32) for name in ("a.weight", "b.weight")}
    return build(tmp_path / "c", {"model": arrays}, extent_bytes=2**16, file_bytes_max=2**30)


@pytest.mark.parametrize("native", [True, False])
def test_loads_are_the_same_with_it_and_without(large: Built, monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    """Both hand over what was written, and name the same damage, of which nothing stays where it belongs."""
    if not native:
        monkeypatch.setattr(digest, "native", lambda: None)
    entry = large.manifest.tensors["model"]["b.weight"]
    monkeypatch.setattr(DirectorySource, "waits", lambda *_: False)
    for damaged in (False, True):
        if damaged:
            flip(large.path / entry.file, entry.start + 2 * 2**16 + 5)
        wants = [want("model", name, whole(array.shape), 4) for name, array in large.arrays["model"].items()]
        with CheckpointReader.open(DirectorySource(large.path)) as reader:
            if damaged:
                with pytest.raises(CorruptExtent, match=r"b\.weight") as caught:
                    reader.load(wants)
                assert caught.value.members["offset"] == entry.start + 2 * 2**16
                with pytest.raises(CorruptExtent, match=r"b\.weight"):
                    reader.prove(wants)
            else:
                reader.prove(wants)
                reader.load(wants)
        for got in wants:
            expected = large.arrays["model"][got.name].view("<u4")
            assert damaged or np.array_equal(got.target, expected)
            assert np.all((got.target == expected) | (got.target == 0))


def test_one_call_takes_what_many_took(large: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is wrong, no extent is digested in Python."""
    wants = [want("model", name, whole(array.shape), 4) for name, array in large.arrays["model"].items()]
    monkeypatch.setattr(DirectorySource, "waits", lambda *_: False)
    with CheckpointReader.open(DirectorySource(large.path)) as reader:
        monkeypatch.setattr("holdfast.read.verified_load._check", None)
        reader.load(wants)
    for got in wants:
        assert np.array_equal(got.target, large.arrays["model"][got.name].view("<u4"))
