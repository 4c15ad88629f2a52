"""The members of a NeMo archive are files in their places; one that is cut, leads out or comes twice is refused."""

from __future__ import annotations

import gzip
import random
import tarfile
from pathlib import Path

import pytest

from holdfast_formats.errors import CheckpointError, CorruptManifest, InvalidRequest, LimitExceeded, StateMismatch
from holdfast_service.storage import tier_at
from holdfast_service.wings.convert.foreign.nemo import archive
from holdfast_service.wings.convert.foreign.nemo.archive import ArchivedFiles
from tests.wings.convert.foreign.nemo.archives import member, packed

NAME = "m.nemo"
DATA = {"model_config.yaml": b"a: 1\n", "weights/x.bin": bytes(range(256)) * 5, "empty": b""}
LONG = f"{'d' * 90}/{'n' * 120}"


def opened(top: Path, data: bytes) -> ArchivedFiles:
    (top / NAME).write_bytes(data)
    return ArchivedFiles(tier_at(top), NAME)


def whole(form: int = tarfile.PAX_FORMAT) -> bytes:
    directories = (member("./", kind=tarfile.DIRTYPE), member("weights/", kind=tarfile.DIRTYPE))
    return packed(*directories, *(member(f"./{name}", data) for name, data in (DATA | {LONG: b"long"}).items()), form=form)


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT], ids=["pax", "gnu"])
@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gzip"])
def test_files_in_an_archive(tmp_path: Path, form: int, zipped: bool) -> None:
    """As they would be in a directory, also with long names; whatever is outside of them is not read."""
    data = whole(form)
    files = opened(tmp_path, gzip.compress(data) if zipped else data)
    assert files.list("") == sorted(["d" * 90, "empty", "model_config.yaml", "weights"])
    assert files.list("weights") == ["x.bin"] and files.list("nothing") == []
    for name, held in (DATA | {LONG: b"long"}).items():
        assert files.size(name) == len(held) and files.read(name) == held
        assert files.stamp(name).startswith(f"{len(held):x}.")
    assert files.read("weights/x.bin", 250, 12) == DATA["weights/x.bin"][250:262]
    assert files.read("weights/x.bin", 1278, 12) == b"\xfe\xff" and files.read("weights/x.bin", 9999, 5) == b""
    buffer = bytearray(8)
    assert files.read_stored("weights/x.bin", 1277, buffer) == 3 and buffer == b"\xfd\xfe\xff" + bytes(5)
    assert files.size("weights") is None and files.stamp("other") == "" and files.label.endswith(f"/{NAME}")
    with pytest.raises(InvalidRequest, match="has no file 'other'"):
        files.read_into("other", 0, buffer)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        files.read_into("weights/x.bin", -1, buffer)


def test_a_change_is_noticed(tmp_path: Path) -> None:
    """The stamp of each member is the archive's."""
    files = opened(tmp_path, whole())
    before = files.stamp("empty")
    (tmp_path / NAME).write_bytes(whole() + bytes(512))
    assert files.stamp("empty") != before


BAD: dict[str, tuple[bytes, str, type[CheckpointError]]] = {
    "a path out": (packed(member("../x", b"1")), "leads out", StateMismatch),
    "a path from the root": (packed(member("/etc/passwd", b"1")), "leads out", StateMismatch),
    "a path out by its settings": (packed(member("n" * 120 + "/../../x", b"1")), "leads out", StateMismatch),
    "a link": (packed(member("w", kind=tarfile.SYMTYPE, link="/etc/passwd")), "'w' is a link", StateMismatch),
    "a hard link": (packed(member("a", b"1"), member("w", kind=tarfile.LNKTYPE, link="a")), "is a link", StateMismatch),
    "a device": (packed(member("w", kind=tarfile.CHRTYPE)), "is a link or a device", StateMismatch),
    "twice": (packed(member("a", b"1"), member("./a", b"2")), "'a' is there twice", StateMismatch),
    "a file and a directory": (packed(member("a", b"1"), member("a/b", b"2")), "is a file and a directory", StateMismatch),
    "no name": (packed(member(".", b"1")), "a file has no name", StateMismatch),
    "no tar": (b"x" * 2048, "is no tar", CorruptManifest),
    "nothing": (b"", "without the end of a tar", CorruptManifest),
    "more behind it": (whole() + b"x" * 512, "follow the end", StateMismatch),
    "much behind it": (whole() + bytes(archive._PADDING_MAX + 1), "follow the end", StateMismatch),
    "a web page": (b"<!DOCTYPE html>" + bytes(2000), "web page", CorruptManifest),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(tmp_path: Path, case: str) -> None:
    data, said, error = BAD[case]
    with pytest.raises(error, match=said) as refused:
        opened(tmp_path, data)
    assert refused.value.members["file"] == NAME and refused.value.hint


def test_holes(tmp_path: Path) -> None:
    """A sparse file in the newer form is a file with settings."""
    about, data = member("a", b"1")
    about.pax_headers = {"GNU.sparse.major": "1"}
    with pytest.raises(StateMismatch, match="'a' has holes"):
        opened(tmp_path, packed((about, data)))


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the number of files, and of the length of a name."""
    monkeypatch.setattr(archive, "NAMES_BYTES_MAX", 1000)
    with pytest.raises(LimitExceeded, match="has a name of"):
        opened(tmp_path, packed(member("n/" * 600 + "x", b"1")))
    monkeypatch.setattr(archive, "MEMBERS_MAX", 5)
    with pytest.raises(LimitExceeded, match="over 5 files"):
        opened(tmp_path, packed(*(member(str(number)) for number in range(9)), form=tarfile.GNU_FORMAT))


def test_every_cut(tmp_path: Path) -> None:
    """Wherever an archive ends too early, it is refused as incomplete."""
    data = packed(member("a", b"12345"), member("b", b"6"))
    end = data.rindex(b"6") + 512 - data.rindex(b"6") % 512
    for at in range(1, end, 61):
        with pytest.raises(CorruptManifest) as refused:
            opened(tmp_path, data[:at])
        assert refused.value.members["file"] == NAME
    assert opened(tmp_path, data[: end + 512]).list("") == ["a", "b"]


def test_sizes_that_lie(tmp_path: Path) -> None:
    """Any changed byte is read or refused by name, and nothing beyond the file is."""
    data, draw = whole(), random.Random(3)
    for _ in range(400):
        changed = bytearray(data)
        changed[draw.randrange(len(data))] = draw.randrange(256)
        try:
            files = opened(tmp_path, bytes(changed))
        except CheckpointError as error:
            assert error.members["file"] == NAME
            continue
        for name in files.list(""):
            size = files.size(name)
            assert size is None or len(files.read(name)) == size
