"""plan: a plan's size, and receipts on disk."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.disk import packing
from holdfast_formats.disk.manifests import Extent, FileEntry
from holdfast_formats.errors import CorruptManifest
from holdfast_formats.staging.plan import PlannedFile, Receipt, WritePlan, decode_receipt, encode_receipt
from tests.formats.strategies import SAMPLE_SPECS

DIGEST = "0123456789abcdef"
RECEIPT = Receipt(
    node="node-07",
    run="run",
    step=500,
    attempt=2,
    files=(FileEntry("model.safetensors", 4100, 4096, DIGEST),),
    extents={"model": {"w": (Extent(0, 4, DIGEST),), "empty": ()}},
)


def test_a_receipt_reads_back() -> None:
    """What a node stated is what the commit reads."""
    assert decode_receipt(encode_receipt(RECEIPT)) == RECEIPT


@given(st.data())
def test_a_torn_receipt_is_refused(data: st.DataObject) -> None:
    """Cut anywhere, or noise in its place: a named error that says where it was found."""
    encoded = encode_receipt(RECEIPT)
    for broken in (encoded[: data.draw(st.integers(0, len(encoded) - 1))], data.draw(st.binary(max_size=40))):
        with pytest.raises(CorruptManifest, match="receipts"):
            decode_receipt(broken)


@pytest.mark.parametrize("broken", [b'{"node":"\xff"}', b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}"])
def test_a_hostile_receipt_is_refused(broken: bytes) -> None:
    """Text that is not UTF-8 and nesting without end are named errors too."""
    with pytest.raises(CorruptManifest, match="receipts"):
        decode_receipt(broken)


def test_a_plan_counts_its_files() -> None:
    """The bytes of a plan are those of its files, headers included."""
    plans = packing.pack(SAMPLE_SPECS, 32)
    files = tuple(PlannedFile(plan, ()) for plan in plans)
    plan = WritePlan("run", 500, 2, 1, ("model", "optim"), files, {}, (), {}, {}, b"{}")
    assert plan.bytes == sum(p.bytes for p in plans) > 0
    assert plan.extent_bytes == packing.EXTENT_BYTES_MIN


def test_the_length_of_extents_does_not_depend_on_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the tensors' bytes count, however they are packed and however long headers are."""
    monkeypatch.setattr(packing, "EXTENT_BYTES_MIN", 1)
    monkeypatch.setattr(packing, "EXTENTS_MAX", 2)
    data_bytes = sum(spec.nbytes for spec in SAMPLE_SPECS)
    for limit in (1, 32, 10_000):
        files = tuple(PlannedFile(plan, ()) for plan in packing.pack(SAMPLE_SPECS, limit))
        plan = WritePlan("run", 500, 2, 1, ("model", "optim"), files, {}, (), {}, {}, b"{}")
        assert plan.extent_bytes == packing.extent_bytes(data_bytes) == 32 >= data_bytes / 2
