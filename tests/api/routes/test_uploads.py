"""Uploads over HTTP: what a stranger, a liar or a broken line gets to hear, and that it costs the daemon nothing."""

from __future__ import annotations

import itertools
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import zstandard

from holdfast_formats.digest import digest
from holdfast_formats.staging import wire
from holdfast_service.api.routes.uploads import CHUNK_BYTES_MAX
from tests.checkpoints import build_root
from tests.daemons import RunningDaemon, running
from tests.kit.daemons import own_daemon
from tests.serving import served

MIB = 2**20
ROOM = 9 * MIB
BOMB_BYTES = 256 * MIB
_numbers = itertools.count()


daemon = own_daemon()


@pytest.fixture(scope="module")
def http(daemon: RunningDaemon) -> Iterator[httpx.Client]:
    limits = httpx.Limits(max_keepalive_connections=0)  # the daemon may close an idle one just when it is used again
    with httpx.Client(base_url=daemon.url, trust_env=False, timeout=240, limits=limits) as client:
        yield client


def join(http: httpx.Client) -> str:
    """The path of a rank, of a run of its own, that has reserved a slot."""
    path = f"/v1/ranks/{uuid.uuid4().hex}"
    run = f"run-{next(_numbers)}"
    welcome = http.put(path, json={"protocol": wire.PROTOCOL, "run": run, "rank": 0, "world": 1, "launch": "x"})
    assert (welcome.status_code, welcome.json()["chunk_bytes_max"]) == (200, CHUNK_BYTES_MAX)
    assert http.put(f"{path}/segment", json={"slots": 1, "data_bytes": ROOM, "table_bytes": 4096}).status_code == 204
    return path


@pytest.fixture
def upload(http: httpx.Client) -> str:
    """The path of an upload that has begun."""
    path = f"{join(http)}/uploads/0"
    assert http.put(path, json={"step": 1}).json()["state"] == "open"
    return path


def put(http: httpx.Client, path: str, data: bytes, **changes: str) -> httpx.Response:
    """Send a chunk; `changes` replace headers, `_` for `-`."""
    headers = {
        "Content-Range": f"bytes 0-{len(data) - 1}/{len(data)}",
        "X-Content-Digest": f"xxh3-64={digest(data)}",
        **{name.replace("_", "-"): value for name, value in changes.items()},
    }
    return http.put(path, content=data, headers=headers)


def test_chunks_plain_and_packed(http: httpx.Client, upload: str) -> None:
    """Both are taken as what they are before compression, and a repetition changes nothing."""
    data = os.urandom(1000) + bytes(1000)
    for _ in range(2):
        assert put(http, f"{upload}/data", data).json()["data_bytes"] == 2000
    packed = zstandard.ZstdCompressor().compress(data)
    headers = {"Content_Range": "bytes 2000-3999/4000", "X_Content_Digest": f"xxh3-64={digest(data)}"}
    for _ in range(2):
        assert put(http, f"{upload}/data", packed, Content_Encoding="zstd", **headers).json()["data_bytes"] == 4000
    assert http.get(upload).json()["data_bytes"] == 4000


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"X_Content_Digest": "xxh3-64=0000000000000000"}, 400, "invalid-request"),
        ({"X_Content_Digest": "sha-256=abc"}, 400, "invalid-request"),
        ({"Content_Range": "bytes 5-1/10"}, 400, "invalid-request"),
        ({"Content_Range": "bytes 0-99/50"}, 400, "invalid-request"),
        ({"Content_Range": "items 0-99/100"}, 400, "invalid-request"),
        ({"Content_Range": "bytes 0-199/200"}, 400, "invalid-request"),  # more than the body has
        ({"Content_Range": "bytes 0-49/50"}, 413, "limit-exceeded"),  # less than the body has
        ({"Content_Range": "bytes 7-106/200"}, 400, "invalid-request"),  # a gap
        ({"Content_Range": f"bytes {ROOM - 50}-{ROOM + 49}/{ROOM + 50}"}, 413, "limit-exceeded"),
        ({"Content_Range": f"bytes 0-{CHUNK_BYTES_MAX}/{ROOM}"}, 413, "limit-exceeded"),
        ({"Content_Range": f"bytes {10**15}-{10**15 + 99}/{10**16 - 1}"}, 413, "limit-exceeded"),
        ({"Content_Encoding": "gzip"}, 400, "invalid-request"),
        ({"Content_Encoding": "zstd"}, 400, "invalid-request"),  # which it is not
    ],
)
def test_a_chunk_that_lies_is_a_problem(
    http: httpx.Client, upload: str, changes: dict[str, str], status: int, code: str
) -> None:
    """Whatever is wrong has a name, nothing of the chunk is taken, and the right one is taken after it."""
    data = os.urandom(100)
    refused = put(http, f"{upload}/data", data, **changes)
    assert (refused.status_code, refused.json()["code"]) == (status, code)
    assert refused.headers["content-type"] == "application/problem+json"
    assert http.get(upload).json()["data_bytes"] == 0
    assert put(http, f"{upload}/data", data).json()["data_bytes"] == 100


@pytest.mark.parametrize("missing", ["Content-Range", "X-Content-Digest"])
def test_a_chunk_without_its_headers_is_a_problem(http: httpx.Client, upload: str, missing: str) -> None:
    """Where it stands and what its digest is must be said."""
    headers = {"Content-Range": "bytes 0-2/3", "X-Content-Digest": f"xxh3-64={digest(b'abc')}"}
    refused = http.put(f"{upload}/data", content=b"abc", headers={k: v for k, v in headers.items() if k != missing})
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid-request")


def test_an_endless_body_is_cut(http: httpx.Client, upload: str) -> None:
    """Without a Content-Length the body is read as far as its range goes, and no farther."""

    def endless() -> Iterator[bytes]:
        for _ in range(1000):
            yield bytes(65_536)

    headers = {"Content-Range": "bytes 0-99/100", "X-Content-Digest": f"xxh3-64={digest(bytes(100))}"}
    try:
        assert http.put(f"{upload}/data", content=endless(), headers=headers).status_code == 413
    except httpx.TransportError as error:
        assert isinstance(error, httpx.WriteError | httpx.ReadError), "the daemon hung up before the end"
    assert http.get(upload).json()["data_bytes"] == 0


@pytest.mark.parametrize("stated", [True, False], ids=["with its size", "without its size"])
def test_bombs_cost_no_memory(daemon: RunningDaemon, http: httpx.Client, upload: str, stated: bool) -> None:
    """A frame that holds far more than its range states is refused by many at once, and not one of them is unpacked."""
    bomb = zstandard.ZstdCompressor(level=19, write_content_size=stated).compress(bytes(BOMB_BYTES))
    put(http, f"{upload}/data", bytes(100))  # what is needed once is there
    before = resident_peak(daemon)
    headers = {"Content_Encoding": "zstd", "X_Content_Digest": f"xxh3-64={digest(bytes(CHUNK_BYTES_MAX))}"}
    headers["Content_Range"] = f"bytes 0-{CHUNK_BYTES_MAX - 1}/{CHUNK_BYTES_MAX}"
    answers: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda: answers.append(put(http, f"{upload}/data", bomb, **headers))) for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {answer.json()["code"] for answer in answers} == {"invalid-request"} and len(answers) == 16
    assert resident_peak(daemon) - before < BOMB_BYTES  # chunks and the allocator take a tenth of that
    assert http.get(upload).json()["data_bytes"] == 100


def resident_peak(daemon: RunningDaemon) -> int:
    """The most memory that the daemon ever had, in bytes."""
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def test_a_line_that_breaks_in_a_chunk(daemon: RunningDaemon, http: httpx.Client, upload: str) -> None:
    """A body shorter than its Content-Length, then silence: nothing is taken, and the chunk can be sent again."""
    host, port = daemon.url.removeprefix("http://").split(":")
    data = os.urandom(1000)
    head = (
        f"PUT {upload}/data HTTP/1.1\r\nHost: {host}\r\nContent-Length: 1000\r\nContent-Range: bytes 0-999/1000\r\n"
        f"X-Content-Digest: xxh3-64={digest(data)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port))) as line:
        line.sendall(head.encode() + data[:500])
    assert http.get(upload).json()["data_bytes"] == 0
    assert put(http, f"{upload}/data", data).json()["data_bytes"] == 1000


def test_nobody_can_act_as_a_rank_that_said_no_hello(http: httpx.Client) -> None:
    """An unknown id is 404, one that is none is 400, an upload that was not opened is 400."""
    stranger = f"/v1/ranks/{uuid.uuid4().hex}"
    for method, path in (("GET", "outcomes"), ("GET", "uploads/0")):
        refused = http.request(method, f"{stranger}/{path}")
        assert (refused.status_code, refused.json()["code"]) == (404, "no-such-resource")
    assert put(http, f"{stranger}/uploads/0/data", b"x").status_code == 404
    assert http.put("/v1/ranks/short", json={}).status_code == 400
    assert http.get(f"{join(http)}/uploads/7").json()["reason"] == "not-open"
    assert http.put(f"{join(http)}/uploads/-1", json={"step": 1}).status_code == 400


def test_memory_that_is_not_there_is_refused(http: httpx.Client) -> None:
    """413 with the numbers, before anything is sent."""
    refused = http.put(f"{join(http)}/segment", json={"slots": 64, "data_bytes": 2**40, "table_bytes": 0})
    assert (refused.status_code, refused.json()["code"]) == (413, "limit-exceeded")


def test_outcomes_are_waited_for(http: httpx.Client, upload: str) -> None:
    """Whoever waits hears of an end when it comes; whoever parts is known no more."""
    rank = upload.removesuffix("/uploads/0")
    assert http.get(f"{rank}/outcomes", params={"wait_s": 0.01}).json() == {"items": [], "next": 0, "stop": False}
    heard: list[dict] = []
    waiting = threading.Thread(target=lambda: heard.append(http.get(f"{rank}/outcomes", params={"wait_s": 20}).json()))
    waiting.start()
    time.sleep(0.2)
    problem = {"code": "torn-snapshot", "detail": "w changed", "hint": ""}
    assert http.post(f"{upload}/abandon", json={"problem": problem}).json()["state"] == "aborted"
    waiting.join()
    assert (heard[0]["next"], heard[0]["items"][0]["problem"]["code"]) == (1, "torn-snapshot")
    assert put(http, f"{upload}/data", b"late").json()["code"] == "torn-snapshot"
    assert http.delete(rank).status_code == http.delete(rank).status_code == 204
    assert http.get(upload).json()["code"] == "round-aborted"


def test_the_daemon_ends_though_ranks_wait(tmp_path: Path) -> None:
    """Who waits for an outcome is answered when the daemon is told to end, and does not keep it from ending."""
    with running(tmp_path / "root", listen="127.0.0.1:0") as daemon:
        with httpx.Client(base_url=daemon.url, trust_env=False, timeout=180) as http:
            rank = join(http)
        host, port = daemon.url.removeprefix("http://").split(":")
        asked = (f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n" for path in ("/healthz", f"{rank}/outcomes?wait_s=20"))
        with socket.create_connection((host, int(port)), timeout=180) as line:
            line.sendall("".join(asked).encode())
            answers = line.recv(65_536)  # the first one is answered: the daemon has both, and waits with the second
            assert answers.startswith(b"HTTP/1.1 200")
            assert daemon.stop() == 0
            while part := line.recv(65_536):
                answers += part
    assert b"HTTP/1.1 503" in answers


def test_a_service_without_a_daemon_takes_no_uploads(tmp_path: Path) -> None:
    """It says so by name."""
    build_root(tmp_path, {"tiny": (1,)})
    with served(tmp_path) as service:
        refused = httpx.get(f"{service.url}/v1/ranks/{'a' * 32}/outcomes", trust_env=False)
    assert (refused.status_code, refused.json()["code"]) == (404, "no-such-resource")
