"""Statistics of portions come together to what one reader finds, bit for bit, however the checkpoint was divided."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.disk import verification
from holdfast_formats.errors import CorruptStatistics
from holdfast_formats.rest import portion_statistics
from holdfast_formats.rest.statistics import PartStatistics, listed, merge, tabulate, tensors_of
from tests.checkpoints import Built, build

Parts = dict[tuple[str, str], dict[int, PartStatistics]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("root") / "made", extent_bytes=64)


def parts_of(built: Built) -> Parts:
    """Some numbers of every extent, among them what is no number."""
    chance = np.random.default_rng(7)
    found: Parts = {}
    for group, name, entry in tensors_of(built.manifest):
        for index, extent in enumerate(entry.extents):
            mean, norm = chance.standard_normal(2).tolist()
            change = None if index == 5 else abs(norm) / 3
            part = PartStatistics(int(extent.length), index % 2, index % 3, 1, -mean, mean, mean, abs(norm), change)
            found.setdefault((group, name), {})[extent.offset] = part if index != 3 else PartStatistics(nan=4)
    return found


def encode(built: Built, parts: Parts) -> bytes:
    """These parts, and nothing of the others."""
    extents = verification.extents(built.manifest)
    keys = [(group, name, extent.offset) for group, name, entry in tensors_of(built.manifest) for extent in entry.extents]
    held = [parts.get((group, name), {}).get(offset) for group, name, offset in keys]
    table = tabulate([one or PartStatistics() for one in held])
    return portion_statistics.encode(extents, table, np.array([one is not None for one in held], np.bool_))


@given(st.integers(0, 2**32), st.integers(1, 5))
def test_the_same_as_of_one_reader(built: Built, seed: int, count: int) -> None:
    """Every extent at whichever node: the same floats."""
    parts = parts_of(built)
    chance = np.random.default_rng(seed)
    portions: list[Parts] = [{} for _ in range(count)]
    for key, held in parts.items():
        for offset, part in held.items():
            portions[chance.integers(count)].setdefault(key, {})[offset] = part
    found = portion_statistics.put_together(built.manifest, [encode(built, portion) for portion in portions])
    assert found is not None
    whole = [parts.get((group, name), {}) for group, name, _ in tensors_of(built.manifest)]
    assert listed(found) == [merge([held[offset] for offset in sorted(held)]) for held in whole]


def test_a_tensor_that_is_not_whole(built: Built) -> None:
    """Without one extent there are no statistics, rather than wrong ones."""
    parts = parts_of(built)
    key = next(key for key, held in parts.items() if len(held) > 1)
    parts[key].popitem()
    assert portion_statistics.put_together(built.manifest, [encode(built, parts)]) is None


@pytest.mark.parametrize("encoded", [b"?", b"", b"\x28\xb5\x2f\xfd"])
def test_bytes_that_are_none(built: Built, encoded: bytes) -> None:
    """They are refused by name."""
    with pytest.raises(CorruptStatistics):
        portion_statistics.put_together(built.manifest, [encoded])
