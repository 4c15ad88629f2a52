"""Files over HTTP: ranges and validators as RFC 9110 says, and never a byte that was not proven (I7)."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import zstandard

from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest
from holdfast_service.api.content.delivery import not_modified, parse_range, prefers_zstd, weights
from tests.checkpoints import build_root, flip
from tests.serving import Served, served

STEP = "/v1/runs/tiny/checkpoints/5"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Served]:
    """A service over one checkpoint."""
    build_root(tmp_path, {"tiny": (5,)})
    with served(tmp_path) as running:
        yield running


def directory(service: Served) -> Path:
    return service.root / naming.checkpoint_path("tiny", 5)


def largest(service: Served) -> Path:
    return max(directory(service).glob("*.safetensors"), key=lambda path: path.stat().st_size)


def test_every_file_is_served_whole(service: Served, http: httpx.Client) -> None:
    """Every listed file comes back byte for byte, with its exact length and a strong validator."""
    listed = http.get(f"{STEP}/files").json()["items"]
    assert {file["name"] for file in listed} == {path.name for path in directory(service).iterdir()}
    for file in listed:
        got = http.get(f"{STEP}/files/{file['name']}", headers={"Accept-Encoding": "identity"})
        expected = (directory(service) / file["name"]).read_bytes()
        assert (got.status_code, got.content) == (200, expected)
        assert got.headers["content-length"] == str(len(expected)) == str(file["stored"])
        assert got.headers["accept-ranges"] == "bytes"
        assert got.headers["etag"].startswith('"')


def test_ranges(service: Served, http: httpx.Client) -> None:
    """Any single range is the slice of the file, wherever it cuts extents, with 206 and Content-Range."""
    rng = random.Random(11)
    path = largest(service)
    data = path.read_bytes()
    cuts = [(rng.randrange(len(data)), rng.randrange(len(data))) for _ in range(25)]
    for low, high in [(0, 0), (len(data) - 1, len(data) - 1), *(tuple(sorted(cut)) for cut in cuts)]:
        got = http.get(f"{STEP}/files/{path.name}", headers={"Range": f"bytes={low}-{high}"})
        assert (got.status_code, got.content) == (206, data[low : high + 1])
        assert got.headers["content-range"] == f"bytes {low}-{high}/{len(data)}"
        assert got.headers["content-length"] == str(high + 1 - low)
    tail = http.get(f"{STEP}/files/{path.name}", headers={"Range": "bytes=-10"})
    assert tail.content == data[-10:]


def test_range_outside_the_file(service: Served, http: httpx.Client) -> None:
    """A range that holds no byte is 416 with the file's length; so is any range of an empty file."""
    path = largest(service)
    size = path.stat().st_size
    got = http.get(f"{STEP}/files/{path.name}", headers={"Range": f"bytes={size}-"})
    assert (got.status_code, got.headers["content-range"]) == (416, f"bytes */{size}")
    assert got.headers["content-type"] == "application/problem+json"
    assert http.get(f"{STEP}/files/empty.txt", headers={"Range": "bytes=0-0"}).status_code == 416


def test_validators(service: Served, http: httpx.Client) -> None:
    """What the asker has is answered 304, by GET and HEAD; a range whose If-Range is outdated becomes the whole file."""
    url = f"{STEP}/files/{largest(service).name}"
    head = http.head(url)
    assert head.headers["content-length"] == str(largest(service).stat().st_size)
    assert head.content == b""
    etag = head.headers["etag"]
    assert http.get(url, headers={"If-None-Match": etag}).status_code == 304
    assert http.head(url, headers={"If-None-Match": f'"other", W/{etag}'}).status_code == 304
    assert http.get(url, headers={"If-Range": etag, "Range": "bytes=0-1"}).status_code == 206
    assert http.get(url, headers={"If-Range": '"other"', "Range": "bytes=0-1"}).status_code == 200


def test_damage_before_the_first_byte(service: Served, http: httpx.Client) -> None:
    """A range of a damaged extent is a problem with file, tensor and byte range; other ranges of the file still come."""
    path = largest(service)
    size = path.stat().st_size
    flip(path, size - 1, 5)
    url = f"{STEP}/files/{path.name}"
    got = http.get(url, headers={"Range": f"bytes={size - 1}-{size - 1}"})
    body = got.json()
    assert (got.status_code, body["code"], body["retryable"]) == (500, "corrupt-extent", False)
    assert (body["file"], body["offset"] + body["length"]) == (path.name, size)
    assert body["tensor"] is not None
    assert http.get(url, headers={"Range": "bytes=0-99"}).content == path.read_bytes()[:100]


def test_damage_behind_the_first_byte(service: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage found under way cuts the connection: the file never looks complete, and no damaged byte has left."""
    monkeypatch.setattr(
        "holdfast_formats.disk.verification.batches",
        lambda listed: (of[i : i + 1] for of in listed for i in range(len(of))),
    )
    path = largest(service)
    intact = path.read_bytes()
    flip(path, len(intact) - 1)
    received = b""
    with http.stream("GET", f"{STEP}/files/{path.name}") as response:
        assert response.status_code == 200
        with pytest.raises(httpx.RemoteProtocolError):
            for part in response.iter_raw():
                received += part
    assert 0 < len(received) < len(intact)
    assert intact.startswith(received)


@pytest.mark.parametrize("keep", [None, 10])
def test_missing_and_truncated_files(service: Served, http: httpx.Client, keep: int | None) -> None:
    """A file that is gone or shorter is a problem that names it, and the listing says what is on storage."""
    path = largest(service)
    data = path.read_bytes()
    path.unlink()
    if keep is not None:
        path.write_bytes(data[:keep])
    got = http.get(f"{STEP}/files/{path.name}")
    assert (got.status_code, got.json()["code"], got.json()["file"]) == (500, "corrupt-manifest", path.name)
    tail = http.get(f"{STEP}/files/{path.name}", headers={"Range": "bytes=-5"})
    assert (tail.status_code, tail.json()["file"]) == (500, path.name)
    assert http.head(f"{STEP}/files/{path.name}").status_code == 500
    stored = {file["name"]: file["stored"] for file in http.get(f"{STEP}/files").json()["items"]}
    assert stored[path.name] == keep


@pytest.mark.parametrize(("name", "code"), [(naming.COMMIT, "not-committed"), (naming.MANIFEST, "corrupt-manifest")])
def test_damaged_commit_or_manifest(service: Served, http: httpx.Client, name: str, code: str) -> None:
    """With COMMIT or manifest damaged or gone, also behind the service's back, neither of them is handed over."""
    assert http.get(f"{STEP}/manifest").status_code == 200
    flip(directory(service) / name, 0)
    assert http.get(f"{STEP}/files/{name}").json()["code"] == code
    assert http.get(f"{STEP}/manifest").json()["code"] == code
    (directory(service) / name).unlink()
    assert http.get(f"{STEP}/files/{name}").json()["code"] == code


@pytest.mark.parametrize("member", ["files", "bytes"])
def test_a_commit_whose_counts_are_wrong(service: Served, http: httpx.Client, member: str) -> None:
    """All that COMMIT states is compared, not only its digest: one whose counts were flipped is handed to nobody."""
    path = directory(service) / naming.COMMIT
    stated = re.search(rb'"%s":\d+' % member.encode(), path.read_bytes())
    assert stated is not None
    flip(path, stated.end() - 1)  # another digit
    for behind in ("manifest", f"files/{naming.COMMIT}", f"files/{naming.MANIFEST}", "files/state.json"):
        got = http.get(f"{STEP}/{behind}")
        assert (got.status_code, got.json()["code"]) == (500, "corrupt-manifest"), behind


def test_a_manifest_that_is_known_is_not_read_again(service: Served, http: httpx.Client) -> None:
    """COMMIT states its validator: 304 while that stands, in each coding. What COMMIT does not vouch for never leaves."""
    url = f"{STEP}/manifest"
    tags = [http.get(url, headers={"Accept-Encoding": coding}).headers["etag"] for coding in ("identity", "zstd")]
    assert tags[1] == tags[0][:-1] + '-zstd"'
    (directory(service) / naming.MANIFEST).write_bytes(b"{}")
    for coding, tag in zip(("identity", "zstd"), tags, strict=True):
        known = http.get(url, headers={"Accept-Encoding": coding, "If-None-Match": tag})
        assert (known.status_code, known.headers["etag"], known.content) == (304, tag, b"")
        assert http.get(url, headers={"Accept-Encoding": coding}).json()["code"] == "corrupt-manifest"
        assert (
            http.get(url, headers={"Accept-Encoding": coding, "If-None-Match": '"x"'}).json()["code"] == "corrupt-manifest"
        )


def test_names_that_are_not_files(http: httpx.Client) -> None:
    """A name that the manifest does not list is not found, whatever it might reach."""
    for name in ("nope.json", "..%2f..%2f..%2fcatalog.sqlite", "%2e%2e"):
        got = http.get(f"{STEP}/files/{name}")
        assert (got.status_code, got.json()["code"]) == (404, "no-such-resource")


def test_parse_range() -> None:
    """Single ranges are cut to the file; what RFC 9110 lets a server ignore is ignored."""
    assert parse_range("bytes=0-9", 100) == (0, 10)
    assert parse_range("bytes=90-900", 100) == (90, 100)
    assert parse_range("bytes=-200", 100) == (0, 100)
    assert parse_range("bytes= 5 - ", 100) == (5, 100)
    for ignored in (None, "", "bytes=-", "bytes=1-2,4-5", "lines=1-2", "bytes=9-2", "bytes=a-b"):
        assert parse_range(ignored, 100) is None
    for outside in ("bytes=100-", "bytes=-0"):
        with pytest.raises(InvalidRequest):
            parse_range(outside, 100)


def test_not_modified() -> None:
    """If-None-Match takes a list, weak tags and a star."""
    assert not_modified('"a", W/"b"', '"b"')
    assert not_modified("*", '"b"')
    assert not not_modified('"a"', '"b"')
    assert not not_modified(None, '"b"')


def test_compression(service: Served, http: httpx.Client) -> None:
    """A file is packed for who prefers zstd, with a validator of its own; who names it among others gets a length."""
    path = largest(service)
    url = f"{STEP}/files/{path.name}"
    with http.stream("GET", url, headers={"Accept-Encoding": "zstd"}) as packed:
        raw = b"".join(packed.iter_raw())
    assert zstandard.ZstdDecompressor().decompressobj().decompress(raw) == path.read_bytes()
    assert (packed.headers["content-encoding"], packed.headers["vary"]) == ("zstd", "Accept-Encoding, Authorization, Cookie")
    assert "content-length" not in packed.headers
    plain = http.get(url, headers={"Accept-Encoding": "gzip, deflate, zstd"})
    assert plain.headers["content-length"] == str(path.stat().st_size)
    assert packed.headers["etag"] == plain.headers["etag"][:-1] + '-zstd"'


def test_preferences() -> None:
    """Weights are read as RFC 9110 has them; zstd is preferred where nothing but plain bytes is named as high."""
    assert weights("a;q=0.5, B ;q=0, c;x=1;q=0.250") == {"a": 0.5, "b": 0.0, "c": 0.25}
    for header in ("zstd", "ZSTD", "zstd;q=0.5", "zstd, identity", "gzip;q=0.5, zstd;q=0.9", "identity;q=0, zstd"):
        assert prefers_zstd(header)
    for header in ("", "*", "gzip, zstd", "zstd;q=0", "zstd;q=0.1, identity", "zstd;q=0.5, gzip", "identity"):
        assert not prefers_zstd(header)
