"""Requests that somebody hostile makes by hand: names that are paths, planted links, ranges and lengths that lie."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats import naming
from holdfast_formats.digest import digest
from holdfast_formats.errors import LEAVES
from holdfast_formats.staging import wire
from tests.checkpoints import build_root
from tests.daemons import RunningDaemon
from tests.kit.daemons import own_daemon
from tests.serving import Served, received, served

SECRET = b"nobody is to read this"
STEP = "/v1/runs/tiny/checkpoints/5"
CODES = {leaf.code for leaf in LEAVES}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service over a root that has a secret beside it."""
    place = tmp_path_factory.mktemp("place")
    (place / "secret").write_bytes(SECRET)
    build_root(place / "root", {"tiny": (5,)})
    with served(place / "root") as running_:
        yield running_


def raw(service: Served, target: bytes, *headers: bytes, method: bytes = b"GET", body: bytes = b"") -> bytes:
    """The answer to a request whose target is sent as it is: no client tidies it up."""
    host, _, port = service.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=180) as connection:
        lines = [method + b" " + target + b" HTTP/1.1", b"Host: localhost", b"Connection: close", *headers]
        connection.sendall(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        return received(connection)


def check_refused(answer: bytes) -> None:
    """A problem with a code of ours, below 500, and not a byte of what is not to be read."""
    assert SECRET not in answer and b"root:" not in answer
    status = int(answer.split(b" ", 2)[1])
    assert 400 <= status < 500, answer[:300]
    assert b"application/problem+json" in answer.lower()
    assert any(f'"code":"{code}"'.encode() in answer.replace(b'": "', b'":"') for code in CODES), answer[:500]


ESCAPES = [
    "../secret",
    "../../secret",
    "../../../../secret",
    "..%2f..%2f..%2fsecret",
    "%2e%2e%2fsecret",
    "%2e%2e/%2e%2e/%2e%2e/secret",
    "..%252f..%252fsecret",
    "..%c0%af..%c0%afsecret",
    "%2fetc%2fpasswd",
    "/etc/passwd",
    "....//secret",
    "..\\..\\secret",
    "..%5c..%5csecret",
    "%00",
    "COMMIT%00.json",
    "COMMIT%0a",
    "COMMIT/",
    "./COMMIT/.",
    ".",
    "..",
    "%ff%fe",
    "%e2%80%ae",
    "%f0%9f%92%a9",
    "a" * 300,
    "a" * 60_000,
    "run.json",
    "..%2f..%2frun.json",
    "catalog.sqlite",
    "con:",
    "~root",
    "$HOME",
    "%s%n",
    "'; DROP TABLE runs; --".replace(" ", "%20"),
]


@pytest.mark.parametrize("name", ESCAPES, ids=lambda name: name[:24])
@pytest.mark.parametrize(
    "path",
    [f"{STEP}/files/{{}}", "/v1/runs/{}", "/v1/runs/{}/checkpoints/5", "/v1/runs/tiny/checkpoints/{}", "/v1/tokens/{}"],
)
def test_names_that_are_paths(service: Served, path: str, name: str) -> None:
    """In the place of a file, a run, a step or a token: refused, whatever the spelling, and nothing is read."""
    method = b"DELETE" if "tokens" in path else b"GET"
    if name.endswith(("/", ".")) and name != "..":  # a slash at the end is sent elsewhere, a dot may be a name
        name += "x"
    check_refused(raw(service, path.format(name).encode(), method=method))


def test_names_of_a_hundred_thousand_bytes(service: Served) -> None:
    """A head of that size is no request; the service goes on."""
    answer = raw(service, f"{STEP}/files/{'a' * 100_000}".encode())
    assert answer == b"" or b" 4" in answer.splitlines()[0]
    assert httpx.get(f"{service.url}{STEP}", trust_env=False).status_code == 200


@given(name=st.text(min_size=1, max_size=40))
def test_names_of_any_characters(service: Served, name: str) -> None:
    """Any Unicode in the place of a name is looked for, or refused; it never fails."""
    try:
        quoted = quote(name, safe="")
    except UnicodeEncodeError:
        quoted = quote(name.encode("utf-8", "surrogatepass"), safe="")
    for path in (
        f"{STEP}/files/{quoted}",
        f"/v1/runs/{quoted}",
        f"{STEP}/tensors?group={quoted}",
        f"/v1/rounds?run={quoted}",
    ):
        answer = raw(service, path.encode())
        status = int(answer.split(b" ", 2)[1])
        assert status in (307, 400, 404), answer[:300]


PLANTED = ("corrupt-manifest", "corrupt-extent", "not-committed", "no-such-resource", "storage-failed")


def planted(root: Path, kind: str) -> str:
    """Plant a link of this kind; the path by which one would read through it."""
    checkpoint = root / naming.checkpoint_path("tiny", 5)
    if kind == "file":
        target = next(checkpoint.glob("model-*.safetensors"))
        target.unlink()
        target.symlink_to(root.parent / "secret")
        return f"{STEP}/files/{target.name}"
    if kind == "commit":
        (checkpoint / naming.COMMIT).rename(root.parent / "commit")
        (checkpoint / naming.COMMIT).symlink_to(root.parent / "commit")
        return f"{STEP}/manifest"
    if kind == "checkpoint":
        checkpoint.rename(root.parent / "elsewhere")
        checkpoint.symlink_to(root.parent / "elsewhere")
        return f"{STEP}/files/state.json"
    if kind == "fifo":
        target = checkpoint / "config.json"
        target.unlink()
        os.mkfifo(target)
        return f"{STEP}/files/config.json"
    (root / "tiny").rename(root.parent / "run")
    (root / "tiny").symlink_to(root.parent / "run")
    return f"{STEP}/files/state.json"


@pytest.mark.parametrize("kind", ["file", "commit", "checkpoint", "fifo", "run"])
def test_links_that_were_planted(tmp_path: Path, kind: str) -> None:
    """Nothing is read through a link, nor waited for in a pipe: it is damaged, not there, or not to be read."""
    root = tmp_path / "root"
    (tmp_path / "secret").write_bytes(SECRET)
    build_root(root, {"tiny": (5,)})
    with served(root) as service:
        path = planted(root, kind)
        answer = httpx.get(service.url + path, trust_env=False, timeout=180)
        assert answer.status_code in (404, 500, 503) and SECRET not in answer.content
        assert answer.json()["code"] in PLANTED, answer.text
        listed = httpx.get(f"{service.url}{STEP}/files", trust_env=False, timeout=180)
        assert listed.status_code in (200, 404, 500, 503)


def test_removing_a_checkpoint_removes_nothing_behind_a_link(tmp_path: Path) -> None:
    """A link planted in a checkpoint is refused or goes as a link; what it leads to stays."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(SECRET)
    build_root(root, {"tiny": (5, 10)})
    (root / naming.checkpoint_path("tiny", 5) / "more").symlink_to(outside)
    with served(root) as service:
        answer = httpx.delete(service.url + STEP, trust_env=False, timeout=180)
        assert answer.status_code in (204, 409), answer.text
    assert (outside / "precious").read_bytes() == SECRET


RANGES = [
    "bytes=0-0",
    "bytes=-1",
    "bytes=-0",
    "bytes=5-1",
    "bytes=",
    "bytes=-",
    "bytes=a-b",
    "bytes=0-0,1-1",
    "bytes=" + ",".join(f"{i}-{i}" for i in range(5000)),
    "bytes=0-18446744073709551616",
    "bytes=99999999999999999999-",
    "bytes=-99999999999999999999",
    "bytes=" + "9" * 5000 + "-",
    "lines=1-2",
    "bytes=0-0;q=1",
    "bytes= 0 - 0",
    "bytes=\u0660-\u0661",
    "\x00",
]


@pytest.mark.parametrize("stated", RANGES, ids=lambda stated: repr(stated[:24]))
@pytest.mark.parametrize("path", [f"{STEP}/files/state.json", f"{STEP}/shard"])
def test_ranges_galore(service: Served, path: str, stated: str) -> None:
    """A range is answered by its bytes, ignored, or not satisfiable: never more than the file, never a defect."""
    whole = httpx.get(service.url + path, trust_env=False).content
    answer = raw(service, path.encode(), b"Range: " + stated.encode())
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    assert status in (200, 206, 400, 416), head
    if status in (200, 206):
        assert len(body) <= len(whole) and body in whole


daemon = own_daemon()


def rank(daemon: RunningDaemon, number: int, run: str) -> str:
    """The path of an upload that has begun."""
    path = f"{daemon.url}/v1/ranks/{number:032x}"
    hello = {"protocol": wire.PROTOCOL, "run": run, "rank": 0, "world": 1, "launch": "x"}
    assert httpx.put(path, json=hello, trust_env=False).status_code == 200
    room = {"slots": 1, "data_bytes": 10_000, "table_bytes": 4096}
    assert httpx.put(f"{path}/segment", json=room, trust_env=False).status_code == 204
    assert httpx.put(f"{path}/uploads/0", json={"step": 1}, trust_env=False).status_code == 200
    return f"{path}/uploads/0"


def chunk(data: bytes, first: int, total: int) -> dict[str, str]:
    return {"Content-Range": f"bytes {first}-{first + len(data) - 1}/{total}", "X-Content-Digest": f"xxh3-64={digest(data)}"}


def test_many_at_once_on_one_upload(daemon: RunningDaemon) -> None:
    """Chunks that race each other, out of order and twice, are each taken whole or refused; the slot is what was sent."""
    path = rank(daemon, 1, "racing")
    data = os.urandom(10_000)
    pieces = [(at, data[at : at + 1000]) for at in range(0, 10_000, 1000)]
    statuses: list[int] = []

    def send(order: list[tuple[int, bytes]]) -> None:
        with httpx.Client(trust_env=False, timeout=180) as client:
            for at, piece in order * 10:
                answer = client.put(f"{path}/data", content=piece, headers=chunk(piece, at, len(data)))
                statuses.append(answer.status_code)
                assert answer.status_code == 200 or answer.json()["code"] in CODES

    threads = [threading.Thread(target=send, args=(order,)) for order in (pieces, pieces[::-1], pieces)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
    assert set(statuses) <= {200, 400} and 200 in statuses
    assert httpx.get(path, trust_env=False).json()["data_bytes"] == len(data)


@pytest.mark.parametrize(("stated", "sent"), [(50, 100), (100, 50), (0, 100), (10**15, 100)])
def test_a_content_length_that_lies(daemon: RunningDaemon, stated: int, sent: int) -> None:
    """More or fewer bytes than stated: the rest is no second request that does anything, and no half chunk is taken."""
    path = rank(daemon, 100 + stated % 97 + sent, f"lying-{stated}-{sent}")
    data = b"DELETE /v1/runs/x/checkpoints/1 HTTP/1.1\r\n".ljust(sent, b"x")
    host, _, port = daemon.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=180) as connection:
        headers = {**chunk(data, 0, sent), "Content-Length": str(stated), "Host": "localhost"}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        target = path.removeprefix(daemon.url)
        connection.sendall(f"PUT {target}/data HTTP/1.1\r\n{lines}\r\n".encode() + data)
        connection.shutdown(socket.SHUT_WR)
        answer = received(connection)
    assert b" 200 " not in answer.partition(b"\r\n")[0]
    assert httpx.get(path, trust_env=False).json()["data_bytes"] == 0


def test_a_root_that_is_taken_away(tmp_path: Path) -> None:
    """Files that go while they are listed are named, not a defect."""
    root = tmp_path / "root"
    build_root(root, {"tiny": (5,)})
    with served(root) as service:
        shutil.rmtree(root / "tiny")
        for path in (f"{STEP}/files", f"{STEP}/manifest", f"{STEP}/shard", f"{STEP}/files/COMMIT"):
            answer = httpx.get(service.url + path, trust_env=False)
            assert answer.json()["code"] in PLANTED, answer.text
