"""proof: the pieces that prove a checkpoint's files, and what happens when one does not."""

from __future__ import annotations

import json
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.disk import index, packing, verification
from holdfast_formats.disk.verification import Piece
from holdfast_formats.errors import CorruptExtent, CorruptManifest
from holdfast_formats.tensors import TensorSpec
from tests.formats.strategies import SAMPLE_SPECS, content, file_bytes, manifest_of, sample_manifest, specs

PLANS = {plan.name: plan for plan in packing.pack(SAMPLE_SPECS, 64)}
FILES = {name: file_bytes(plan) for name, plan in PLANS.items()}


@given(specs())
def test_verification_tile_every_file(tensors: list[TensorSpec]) -> None:
    """Of any checkpoint, every byte of every file is in exactly one piece, and each piece proves what was written."""
    made = manifest_of(tensors)
    plans = {plan.name: plan for plan in packing.pack(tensors, 64)}
    found = verification.pieces(made)
    assert set(found) == {file.name for file in made.files}
    for file in made.files:
        assert [piece.start for piece in found[file.name]] == [0, *(piece.stop for piece in found[file.name][:-1])]
        assert found[file.name][-1].stop == file.bytes
        assert {piece.file for piece in found[file.name]} == {file.name}
    for name, plan in plans.items():
        data = file_bytes(plan)
        for piece in found[name]:
            verification.check(piece, data[piece.start : piece.stop])
            if piece.tensor is not None:
                spec = next(s for s, _ in plan.tensors if s.name == piece.tensor)
                assert content(spec)[piece.offset : piece.offset + piece.length] == data[piece.start : piece.stop]


@given(specs())
def test_pieces_are_headers_small_files_and_extents(tensors: list[TensorSpec]) -> None:
    """Each with its place, its digest and its tensor; and the columns know the same of each extent."""
    made = manifest_of(tensors)
    expected = {file.name: [Piece(file.name, 0, file.header_bytes or file.bytes, file.digest)] for file in made.files}
    of_extents = []
    for group, held in made.tensors.items():
        for name, entry in held.items():
            of_extents += [verification.tensor_piece(group, name, entry, extent) for extent in entry.extents]
    for piece in of_extents:
        expected[piece.file].append(piece)
    found = verification.pieces(made)
    assert {file: list(some) for file, some in found.items()} == {
        file: sorted(some, key=lambda piece: piece.start) for file, some in expected.items()
    }
    for some in found.values():
        assert [some[at] for at in range(len(some))] == list(some)
        numbers = some.rows["extent"][some.rows["extent"] >= 0]
        assert [of_extents[number] for number in numbers.tolist()] == [one for one in some if one.tensor is not None]
        assert [piece for again in verification.grouped(list(some)[::-1]) for piece in again] == list(some)


@given(specs(), st.data())
def test_digests_of_many(tensors: list[TensorSpec], data: st.DataObject) -> None:
    """As numbers, at the places of any run of pieces; what the bytes end before has not its digest."""
    for name, plan in {plan.name: plan for plan in packing.pack(tensors, 64)}.items():
        listed = verification.pieces(manifest_of(tensors))[name]
        first = data.draw(st.integers(0, len(listed) - 1))
        some = listed[first : data.draw(st.integers(first + 1, len(listed)))]
        held = bytearray(file_bytes(plan)[some.start : some.stop])
        assert (verification.numbers_in(some, held) == some.rows["digest"]).all()
        cut = data.draw(st.integers(0, len(held)))
        sound = verification.numbers_in(some, memoryview(held)[:cut]) == some.rows["digest"]
        assert sound.tolist() == [piece.stop - some.start <= cut for piece in some]
        at = data.draw(st.integers(0, len(held) - 1))
        held[at] ^= 1
        sound = verification.numbers_in(some, held) == some.rows["digest"]
        assert sound.tolist() == [not piece.start <= some.start + at < piece.stop for piece in some]


@given(st.data())
def test_a_changed_or_missing_byte_is_named(data: st.DataObject) -> None:
    """Whichever byte of a piece changes or is cut off, the error says file, tensor and range (I7)."""
    file = data.draw(st.sampled_from(sorted(FILES)))
    piece = data.draw(st.sampled_from(verification.pieces(sample_manifest())[file]))
    held = bytearray(FILES[file][piece.start : piece.stop])
    at = data.draw(st.integers(0, len(held) - 1))
    for broken in (bytes(held[:at]), bytes([*held[:at], held[at] ^ 1, *held[at + 1 :]])):
        with pytest.raises(CorruptExtent) as caught:
            verification.check(piece, broken)
        assert caught.value.members == {"file": file, "tensor": piece.tensor, "offset": piece.start, "length": piece.length}
        assert f"[{piece.start}, {piece.stop})" in caught.value.detail
        assert piece.tensor is None or repr(piece.tensor) in caught.value.detail
        assert ("cut off" in caught.value.detail) == (len(broken) < piece.length)


def test_bytes_are_counted_and_not_elements() -> None:
    """An array proves its piece by its bytes, whatever its dtype."""
    array = np.arange(4, dtype="<u4")
    piece = Piece("f", 0, 16, verification.digest(array))
    verification.check(piece, array)
    with pytest.raises(CorruptExtent, match="cut off after 12"):
        verification.check(piece, array[:3])


def test_a_file_of_another_length_is_named_with_its_tensors() -> None:
    """A missing or shortened file says which tensors are lost, the first three by name; a longer one loses none."""
    tensors = [TensorSpec("model", f"t{i}", "U8", (4,)) for i in range(5)]
    made = manifest_of(tensors)
    (plan,) = packing.pack(tensors)
    verification.check_size(made, plan.name, plan.bytes)
    verification.check_size(made, "not of the manifest", 7)
    with pytest.raises(CorruptManifest, match="is missing; tensors lost: 't0', 't1', 't2' and 2 more") as caught:
        verification.check_size(made, plan.name, None)
    assert caught.value.members == {"file": plan.name, "tensor": "t0", "offset": 0, "length": plan.bytes}
    with pytest.raises(CorruptManifest, match=r"has 4114 bytes, not 4116; tensors lost: 't4' \[") as caught:
        verification.check_size(made, plan.name, plan.bytes - 2)
    assert caught.value.members == {"file": plan.name, "tensor": "t4", "offset": 4114, "length": 2}
    with pytest.raises(CorruptManifest, match=r"not 4116 \[") as caught:
        verification.check_size(made, plan.name, plan.bytes + 1)
    assert caught.value.members["tensor"] is None


def test_headers_must_state_what_the_manifest_states() -> None:
    """A header with another name, dtype, shape or place than the manifest's is refused by the tensor's name."""
    made = sample_manifest()
    tensors = verification.tensors_by_file(made)
    assert {name: set(held) for name, held in tensors.items()} == {
        name: {spec.name for spec, _ in plan.tensors} for name, plan in PLANS.items()
    }
    for name, held in tensors.items():
        file = made.file(name)
        assert file is not None
        head = FILES[name][: file.header_bytes]
        verification.check_header(file, held, head)
        for tensor, entry in held.items():
            others = [
                {**held, tensor: msgspec.structs.replace(entry, dtype="I32")},
                {**held, tensor: msgspec.structs.replace(entry, shape=(*entry.shape, 1))},
                {**held, tensor: msgspec.structs.replace(entry, start=entry.start + 1)},
                {other: e for other, e in held.items() if other != tensor},
            ]
            for other in others:
                with pytest.raises(CorruptManifest, match=repr(tensor)):
                    verification.check_header(file, other, head)
        with pytest.raises(CorruptManifest, match="'zz'"):
            verification.check_header(file, {**held, "zz": next(iter(held.values()))}, head)


@given(specs())
def test_headers_as_they_are_written(tensors: list[TensorSpec]) -> None:
    """Are known without being decoded, unless tensors have no bytes; the same ones for other tensors are not."""
    made = manifest_of(tensors)
    plans = {plan.name: plan for plan in packing.pack(tensors, 64)}
    turned = {group: dict(reversed(list(held.items()))) for group, held in made.tensors.items()}
    for listed in (made, msgspec.structs.replace(made, tensors=turned)):
        columns = verification.extents(listed)
        for number, file in enumerate(listed.files):
            if file.header_bytes:
                whole = all(spec.nbytes for spec, _ in plans[file.name].tensors)
                assert verification.is_as_written(columns, number, file, plans[file.name].header) or not whole
                assert not verification.is_as_written(columns, number, file, plans[file.name].header + b" ")
    for group, held in made.tensors.items():
        for name, entry in held.items():
            number = next(number for number, file in enumerate(made.files) if file.name == entry.file)
            file, head = made.files[number], plans[entry.file].header
            others = [
                {**held, name: msgspec.structs.replace(entry, dtype="F4")},
                {**held, name: msgspec.structs.replace(entry, shape=(*entry.shape, 1))},
                {**held, name: msgspec.structs.replace(entry, start=entry.start + 1)},
                {other: e for other, e in held.items() if other != name},
                {**held, f"{name}2": entry},
            ]
            for other in others:
                columns = verification.extents(msgspec.structs.replace(made, tensors={**made.tensors, group: other}))
                assert not verification.is_as_written(columns, number, file, head)


def test_headers_may_be_spelled_otherwise() -> None:
    """With the same tensors in another order, other words about them, and other spaces: as another program writes them."""
    made = sample_manifest()
    for name, held in verification.tensors_by_file(made).items():
        file = made.file(name)
        assert file is not None
        document = json.loads(FILES[name][8 : file.header_bytes])
        document = {"__metadata__": {"by": "another"}, **dict(reversed(list(document.items())))}
        text = json.dumps(document, indent=1, separators=(",", ":")).encode()
        text = text.ljust(file.header_bytes - 8)
        verification.check_header(file, held, (file.header_bytes - 8).to_bytes(8, "little") + text)


def test_indexes_must_send_tensors_to_their_files() -> None:
    """A group's index is checked against the manifest: another file, a missing or an additional tensor is refused."""
    made = sample_manifest()
    encoded = index.encode(plan for plan in PLANS.values() if plan.group == "model")
    verification.check_index(made, "model", encoded)
    verification.check_index(made, "nothing", index.encode([]))
    document = json.loads(encoded)
    for change in ({"a": "optim.safetensors"}, {"more": "model.safetensors"}):
        changed = document | {"weight_map": document["weight_map"] | change}
        with pytest.raises(CorruptManifest, match="disagree"):
            verification.check_index(made, "model", json.dumps(changed).encode())
    with pytest.raises(CorruptManifest, match="disagree"):
        verification.check_index(made, "optim", encoded)


@pytest.mark.parametrize(
    "encoded", [b"", b"{}", b'{"weight_map":[]}', b'{"weight_map":{"a":"\xff"}}', b'{"x":' + b"[" * 200_000]
)
def test_what_is_not_an_index_is_refused(encoded: bytes) -> None:
    """Whatever stands in the index's place, the error names it."""
    with pytest.raises(CorruptManifest, match=r"cannot read model\.safetensors\.index\.json"):
        verification.check_index(sample_manifest(), "model", encoded)


@given(specs(), st.integers(1, 9000), st.data())
def test_batches_hold_every_piece_once_and_touch(tensors: list[TensorSpec], bytes_max: int, data: st.DataObject) -> None:
    """Batches are contiguous ranges of one file, within the limit unless a piece alone is over it, and maximal."""
    listed = [piece for pieces in verification.pieces(manifest_of(tensors)).values() for piece in pieces]
    listed = data.draw(st.lists(st.sampled_from(listed), unique=True)) if listed else []
    batches = list(verification.batches(verification.grouped(listed), bytes_max))
    assert [p for batch in batches for p in batch] == sorted(listed, key=lambda p: (p.file, p.start))
    for batch in batches:
        assert [(p.file, p.start) for p in batch[1:]] == [(p.file, p.stop) for p in batch[:-1]]
        assert len(batch) == 1 or batch[-1].stop - batch[0].start <= bytes_max
    for before, after in pairwise(batches):
        joined = before[-1].file == after[0].file and before[-1].stop == after[0].start
        assert not joined or after[0].stop - before[0].start > bytes_max


@given(specs(), st.data())
def test_overlapping_finds_the_pieces_of_a_range(tensors: list[TensorSpec], data: st.DataObject) -> None:
    """A range of a file's bytes is answered with exactly the pieces that hold one of them."""
    for pieces in verification.pieces(manifest_of(tensors)).values():
        start = data.draw(st.integers(0, pieces[-1].stop))
        stop = data.draw(st.integers(start, pieces[-1].stop))
        expected = [p for p in pieces if set(range(p.start, p.stop)) & set(range(start, stop))]
        assert [p for p in verification.overlapping(pieces, start, stop) if start < stop] == expected
