"""table: one rank's part of a save, as it stands in the slot."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.errors import CheckpointError, InvalidRequest, LimitExceeded, StateMismatch
from holdfast_formats.region import Box
from holdfast_formats.staging import slot_table
from holdfast_formats.staging.slot_table import Blob, SlotTable
from holdfast_formats.tensors import StagedFragment, TensorSpec
from tests.formats.strategies import boxes_in, specs

SPEC = TensorSpec("model", "w", "F32", (4, 3))
SAMPLE = SlotTable(
    run="run",
    step=500,
    attempt=2,
    rank=1,
    world=2,
    groups=("model", "extra"),
    fragments=(StagedFragment(SPEC, (Box((2, 0), (2, 3)),), 0, "Shard(0)"),),
    values={"extra": {"lr": "0.5"}},
    aliases={"model": {"tied": "w"}},
    blobs=(Blob("config.json", 24, 2),),
    metrics={"loss": 2.5},
    nonfinite_metrics={"grad_norm": "Infinity"},
    mesh={"dp": 2},
    file_bytes_max=1000,
)
DATA_BYTES = 26


@given(specs(), st.data())
def test_a_table_reads_back(tensors: list[TensorSpec], data: st.DataObject) -> None:
    """Fragments of any tensors and boxes come out of the slot as they went in, from bytes and from shared memory."""
    fragments = []
    end = 0
    for spec in tensors:
        boxes = tuple(data.draw(st.lists(boxes_in(spec.shape), max_size=2)))
        fragment = StagedFragment(spec, boxes, end, frozen=data.draw(st.booleans()))
        fragments.append(fragment)
        end += fragment.nbytes
        fragments.append(StagedFragment(spec, (), 0, rounded_from=data.draw(st.sampled_from(["", "optim"]))))
    made = SlotTable("run", 5, 1, 0, 1, ("model", "optim"), tuple(fragments), {}, {})
    encoded = slot_table.encode(made)
    assert slot_table.decode(encoded, end) == slot_table.decode(memoryview(encoded), end) == made


def test_the_sample_reads_back() -> None:
    """Values, aliases, blobs, metrics and mesh too."""
    assert slot_table.decode(slot_table.encode(SAMPLE), DATA_BYTES) == SAMPLE


def test_fragments_of_tables_without_the_last_fields() -> None:
    """As trainers wrote them before weights could be rounded, or be known as frozen: slots outlive daemons."""
    document = json.loads(slot_table.encode(SAMPLE))
    assert document["fragments"][0].pop() is False
    assert slot_table.decode(json.dumps(document).encode(), DATA_BYTES) == SAMPLE
    assert document["fragments"][0].pop() == ""
    assert slot_table.decode(json.dumps(document).encode(), DATA_BYTES) == SAMPLE


def test_digests_are_put_behind_what_was_encoded_before() -> None:
    """They are known after the copy, and cost no second encoding; a table with another number of them is refused."""
    digests = bytes(range(16))
    encoded = slot_table.with_digests(slot_table.encode(SAMPLE), digests)
    assert slot_table.decode(encoded, DATA_BYTES) == msgspec.structs.replace(SAMPLE, digests=digests)
    assert len(encoded) <= len(slot_table.encode(SAMPLE)) + slot_table.digests_bytes(1)
    assert slot_table.with_digests(slot_table.encode(SAMPLE), b"") == slot_table.encode(SAMPLE)
    with pytest.raises(InvalidRequest, match="digests"):
        slot_table.decode(slot_table.with_digests(slot_table.encode(SAMPLE), digests * 2), DATA_BYTES)
    sparing = msgspec.structs.replace(SAMPLE, unstaged=(StagedFragment(SPEC, (Box((0, 0), (2, 3)),), 10**6),))
    found = slot_table.decode(slot_table.with_digests(slot_table.encode(sparing), digests * 2), DATA_BYTES)
    assert found == msgspec.structs.replace(sparing, digests=digests * 2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"run": "../x"}, "run name"),
        ({"step": -1}, "step must be"),
        ({"rank": 2}, "rank 2 is not valid in a world of 2"),
        ({"rank": -1}, "rank -1"),
        ({"world": 0, "rank": 0}, "rank 0 is not valid in a world of 0"),
        ({"groups": ["model", "Extra"]}, "group name"),
        ({"groups": ["extra"]}, "which is not saved"),
        ({"groups": ["model"]}, r"not saved: \['extra'\]"),
        ({"aliases": {"ema": {}}}, r"not saved: \['ema'\]"),
        ({"blobs": [["COMMIT", 0, 1]]}, "asset name"),
        ({"blobs": [["a", 25, 2]]}, "outside the slot"),
        ({"blobs": [["a", -1, 1]]}, "outside the slot"),
        ({"blobs": [["a", 1, -1]]}, "outside the slot"),
        ({"fragments": [[["model", "w", "F32", [4, 3]], [[[2, 0], [2, 3]]], 3]]}, "outside the slot"),
        ({"fragments": [[["model", "w", "F32", [4, 3]], [[[2, 0], [2, 3]]], -1]]}, "outside the slot"),
        ({"fragments": [[["model", "w", "F31", [4, 3]], [], 0]]}, "unknown dtype"),
        ({"fragments": [[["model", "w", "F32", [-4, -3]], [], 0]]}, "is not a shape"),
        ({"fragments": [[["model", "w", "F32", [4, 3]], [[[0], [2, 3]]], 0]]}, "lies outside shape"),
        ({"fragments": [[["model", "w", "F32", [4, 3]], [[[3, 0], [2, 3]]], 0]]}, "lies outside shape"),
        ({"fragments": [[["model", "w", "F4", [4, 4]], [[[0, 1], [1, 2]]], 0]]}, "inside a byte"),
        (
            {"fragments": [[["model", "w", "BF16", [4, 3]], [], 0, "", "master"]]},
            "rounded from 'master', which is not saved",
        ),
        ({"fragments": [[["model", "w", "BF16", [4, 3]], [[[2, 0], [2, 3]]], 0, "", "extra"]]}, "has parts of its own"),
        ({"fragments": [[["model", "w", "BF16", [4, 3]], [], 0, "", 5]]}, "cannot read"),
        ({"unstaged": [[["model", "w", "F32", [4, 3]], [[[3, 0], [2, 3]]], 0]]}, "lies outside shape"),
        ({"unstaged": [[["ema", "w", "F32", [4, 3]], [], 0]]}, "which is not saved"),
        ({"metrics": {"loss": None}}, "cannot read"),
        ({"step": "5"}, "cannot read"),
        ({"values": {"extra": {"lr": 0.5}}}, "cannot read"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(change: dict[str, Any], reason: str) -> None:
    """Every name, number and box of a rank's table is checked before a byte of its slot is believed."""
    document = json.loads(slot_table.encode(SAMPLE)) | change
    with pytest.raises((InvalidRequest, StateMismatch), match=reason):
        slot_table.decode(json.dumps(document).encode(), DATA_BYTES)


@pytest.mark.parametrize(
    "encoded", [b"", b"[]", b'{"run":"\xff"}', b'{"run":"\\ud800"}', b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}"]
)
def test_what_is_not_a_table_is_refused(encoded: bytes) -> None:
    """Not JSON, not UTF-8, half a surrogate pair, nested too deep."""
    with pytest.raises(InvalidRequest, match="cannot read"):
        slot_table.decode(encoded, 0)


@given(st.data())
def test_random_changes_give_named_errors(data: st.DataObject) -> None:
    """A changed byte, or noise, is a table that fits or a named error, and never an accident."""
    encoded = bytearray(slot_table.encode(SAMPLE))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    for broken in (bytes(encoded), data.draw(st.binary(max_size=40))):
        try:
            assert isinstance(slot_table.decode(broken, DATA_BYTES), SlotTable)
        except CheckpointError:
            continue


def test_encode_refuses_what_would_not_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too large a table, a metric that is no number, a name that is not Unicode: refused on the trainer's side."""
    with pytest.raises(InvalidRequest, match="'loss'"):
        slot_table.encode(msgspec.structs.replace(SAMPLE, metrics={"loss": float("nan")}))
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        slot_table.encode(msgspec.structs.replace(SAMPLE, mesh={"\ud800": 1}))
    monkeypatch.setattr(slot_table, "TABLE_BYTES_MAX", 100)
    with pytest.raises(LimitExceeded, match="1 fragments"):
        slot_table.encode(SAMPLE)
