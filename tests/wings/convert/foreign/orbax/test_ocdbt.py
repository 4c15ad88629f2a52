"""The index of an OCDBT database is read as tensorstore writes it, and nothing that it claims is believed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from holdfast_formats.errors import CheckpointError, CorruptManifest, LimitExceeded, StateMismatch
from holdfast_service.wings.convert.foreign.orbax import ocdbt
from holdfast_service.wings.convert.foreign.orbax.ocdbt import StoredValue
from tests.wings.convert.foreign.directories import OnDisk
from tests.wings.convert.foreign.orbax.files import (
    DATA,
    MAGIC,
    NODE,
    At,
    block,
    data_file,
    database,
    inner,
    leaf,
    manifest,
    numbers,
    put,
)

VALUES = {"a/.zarray": b"{}", "a/0": b"twelve bytes", "a/1": b"", "ab/0": b"and some more bytes", "c/0": b"few"}


def read(directory: Path, files: Mapping[str, bytes]) -> dict[str, StoredValue]:
    return ocdbt.read(OnDisk(put(directory, files)))


def one_node(node: bytes, height: int = 0) -> dict[str, bytes]:
    return {"manifest.ocdbt": manifest(At(0, len(node)), height), DATA: node}


def test_what_is_written(tmp_path: Path) -> None:
    """Values in nodes and in a data file, below a node of two levels, also in a directory of its own."""
    files = database(VALUES)
    for directory in ("", "items"):
        put(tmp_path / directory, files)
        found = ocdbt.read(OnDisk(tmp_path), directory)
        assert {name: one.read(OnDisk(tmp_path), 0, one.size) for name, one in found.items()} == VALUES
        assert {name for name, one in found.items() if one.inline is None} == {"a/0", "ab/0"}


def test_the_base_of_a_path(tmp_path: Path) -> None:
    """What a node of a process refers to is in the directory of the process."""
    node = leaf({"k": b"a value of a process"}, {"k": At(0, 20)}, table=data_file("d/1"))
    table = data_file("ocdbt.process_0/d/1", base=len("ocdbt.process_0/"))
    files = {"manifest.ocdbt": manifest(At(20, len(node)), table=table)}
    files["ocdbt.process_0/d/1"] = b"a value of a process" + node
    assert read(tmp_path, files)["k"] == StoredValue("ocdbt.process_0/d/1", 0, 20)


def test_without_keys(tmp_path: Path) -> None:
    assert read(tmp_path, {"manifest.ocdbt": manifest(At(2**64 - 1, 2**64 - 1))}) == {}


@pytest.mark.parametrize("file", ["manifest.ocdbt", DATA])
def test_cut_or_changed_at_every_byte(tmp_path: Path, file: str) -> None:
    """Refused by the file, or, where only a value is changed, the same keys."""
    files = database(VALUES)
    whole = read(tmp_path, files)
    for at in range(len(files[file])):
        with pytest.raises(CheckpointError) as refused:
            read(tmp_path, files | {file: files[file][:at]})
        assert refused.value.members["file"] in files
        changed = bytearray(files[file])
        changed[at] ^= 1
        try:
            assert read(tmp_path, files | {file: bytes(changed)}).keys() == whole.keys()
        except CheckpointError as error:
            assert error.members["file"] == file
        else:
            assert file == DATA and at < 31


BAD: dict[str, tuple[dict[str, bytes], str, type[CheckpointError]]] = {
    "several manifests": ({"manifest.ocdbt": manifest(At(0, 0), kind=1)}, "in several files", StateMismatch),
    "another version": ({"manifest.ocdbt": block(MAGIC, b"")[:12] + b"\5"}, "not the block", CorruptManifest),
    "a path out": (one_node(leaf({"k": b"v"}, {}, table=data_file("../x"))), "refers to '../x'", CorruptManifest),
    "a node that is its own child": (one_node(inner({"a": At(0, 80)}), 1), "not the block", CorruptManifest),
    "a height": (one_node(inner({"a": At(0, 80)}, height=2), 1), "another height", CorruptManifest),
    "no entries": (one_node(block(NODE, b"\0" + data_file() + b"\0")), "claims 0 entries", CorruptManifest),
    "many entries": (one_node(block(NODE, b"\0" + data_file() + numbers(2**40))), "claims", CorruptManifest),
    "many files": (one_node(block(NODE, b"\0" + numbers(2**40))), "data files", CorruptManifest),
    "another file": (
        one_node(leaf({"k": b"v"}, {"k": At(0, 1)}, table=b"\0")), "refers to data file 0 of 0", CorruptManifest
    ),
    "no text": (one_node(block(NODE, b"\0\0\1\1\xff\0\0")), "not UTF-8", CorruptManifest),
    "a value beyond": (one_node(leaf({"k": bytes(99)}, {"k": At(2**40, 1)})), "missing or cut off", CorruptManifest),
    "no key before": (one_node(block(NODE, b"\0\0\2\5\1\1ab")), "begins like more", CorruptManifest),
    "a long number": (one_node(block(NODE, b"\0" + b"\xff" * 12)), "64 bits", CorruptManifest),
    "not compressed": (one_node(block(NODE, b"\0", compressed=False)), "cut off", CorruptManifest),
    "a bomb": (one_node(block(NODE, bytes(ocdbt.NODE_BYTES_MAX + 1))), "a node of over", LimitExceeded),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(tmp_path: Path, case: str) -> None:
    files, said, error = BAD[case]
    with pytest.raises(error, match=said) as refused:
        read(tmp_path, files)
    assert refused.value.members["file"] in files or "missing" in said


def test_an_index_that_grows_below_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that refer to one node many times, level by level, are read up to a limit."""
    monkeypatch.setattr(ocdbt, "NODES_MAX", 2**9)
    node = leaf({"k": b"v"}, {})
    data, at = node, At(0, len(node))
    for height in range(1, 9):
        node = inner({f"{number:03}": at for number in range(200)}, height)
        data, at = data + node, At(len(data), len(node))
    with pytest.raises(LimitExceeded, match="over 512 nodes") as refused:
        read(tmp_path, {"manifest.ocdbt": manifest(at, 8), DATA: data})
    assert refused.value.members["file"] == DATA


def test_a_checksum() -> None:
    """The value that RFC 3720 gives."""
    assert ocdbt.crc32c(bytes(32)) == 0x8A9136AA
