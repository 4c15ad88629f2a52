"""A checkpoint is divided among nodes: evenly, without a gap, and what one node wrote another one reads."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.disk import verification
from holdfast_formats.disk.manifests import Manifest
from holdfast_service.wings.cluster.check_shares import PORTION_BYTES_MIN, WrittenSpan, divide, within
from tests.checkpoints import build

BLOCK = 2**18
NAMES = [f"n{number}" for number in range(7)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """A checkpoint of 4 MiB in several files."""
    arrays = {f"layer.{n}": np.arange(60_000 + n, dtype=np.float32) for n in range(18)}
    return build(
        tmp_path_factory.mktemp("root") / "made",
        {"model": arrays, "optim": arrays},
        extent_bytes=2**14,
        file_bytes_max=3_000_000,
    ).manifest


def blocks_of(made: Manifest, nodes: int) -> list[WrittenSpan]:
    """As the nodes write: blocks of all files in turn."""
    found: list[WrittenSpan] = []
    for file in made.files:
        for begin in range(0, file.bytes if file.header_bytes else 0, BLOCK):
            found.append(WrittenSpan(file.name, begin, min(begin + BLOCK, file.bytes), NAMES[len(found) % nodes]))
    return found


@given(readers=st.integers(1, 7), writers=st.integers(0, 7))
def test_every_piece_is_in_one_portion(made: Manifest, readers: int, writers: int) -> None:
    """Whoever reads and wrote: all pieces, each once; and portions are equally long but for what an extent is."""
    plans = divide(made, NAMES[:readers], blocks_of(made, writers) if writers else ())
    assert len(plans) == readers
    pieces = [Counter(piece for some in within(made, plan.spans).values() for piece in some) for plan in plans]
    everything = Counter(piece for some in verification.pieces(made).values() for piece in some)
    assert sum(pieces, Counter()) == everything
    assert max(plan.bytes for plan in plans) - min(plan.bytes for plan in plans) <= 1
    assert {plan.reader for plan in plans} == ({None} if readers == 1 else set(NAMES[:readers]))


@pytest.mark.parametrize("nodes", [2, 3, 4, 7])
def test_nobody_reads_what_it_wrote(made: Manifest, nodes: int) -> None:
    """Where those read that wrote: but for the little that makes portions even."""
    written = blocks_of(made, nodes)
    starts, at = {}, 0
    for file in made.files:
        starts[file.name] = at
        at += file.bytes
    own = total = 0
    for plan in divide(made, NAMES[:nodes], written):
        for one in written:
            if one.node == plan.reader:
                low, high = starts[one.file] + one.begin, starts[one.file] + one.end
                own += sum(max(min(high, end) - max(low, begin), 0) for begin, end in plan.spans)
        total += plan.bytes
    assert own <= total * 0.12


def test_a_small_one_is_not_divided(tmp_path: Path) -> None:
    """It takes one node less time than to ask others."""
    small = build(tmp_path / "made", {"model": {"weight": np.zeros(1000, np.float32)}}).manifest
    (plan,) = divide(small, NAMES)
    assert plan.reader is None and plan.bytes < PORTION_BYTES_MIN


def test_spans_that_are_no_file_any_more(made: Manifest) -> None:
    """What was planned and is in no file of the manifest divides nothing."""
    plans = divide(made, NAMES[:2], [WrittenSpan("other.safetensors", 0, 5, "n0"), WrittenSpan("config.json", 5, 5, "n1")])
    assert sum(plan.bytes for plan in plans) == sum(file.bytes for file in made.files) + 1
