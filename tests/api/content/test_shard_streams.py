"""Shards as streams: what becomes of damage under way, of clients that break off, and of too many at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from holdfast_formats import naming
from holdfast_service.api.content import shard_plans, shard_streams
from tests.api.shard_roots import PLAIN, path_of, save
from tests.checkpoints import Built, build, flip
from tests.daemons import wait_until
from tests.layouts.matrix import MODELS
from tests.serving import served


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows so small that every shard has many."""
    monkeypatch.setattr(shard_streams, "WINDOW_BYTES", 1024)


@pytest.fixture
def damaged(tmp_path: Path) -> Iterator[tuple[Built, httpx.Client]]:
    """A checkpoint that a test may damage, behind a service of its own."""
    built = save(tmp_path, MODELS["llama"])
    with served(tmp_path) as running, httpx.Client(base_url=running.url, trust_env=False, headers=PLAIN) as client:
        yield built, client


def test_damage_is_never_sent(damaged: tuple[Built, httpx.Client]) -> None:
    """Of a damaged extent no byte leaves: a problem where nothing was sent yet, else the connection is cut before it."""
    built, http = damaged
    intact = http.get(path_of("llama")).content
    entry = built.manifest.tensors["model"]["model.norm.weight"]
    header_bytes = int.from_bytes(intact[:8], "little")
    at = 8 + header_bytes + json.loads(intact[8 : 8 + header_bytes])["model.norm.weight"]["data_offsets"][0]
    flip(built.path / entry.file, entry.start + 3, 6)
    received = b""
    with http.stream("GET", path_of("llama")) as response:
        assert response.status_code == 200
        with pytest.raises(httpx.RemoteProtocolError):
            for part in response.iter_raw():
                received += part
    assert len(received) <= at
    assert intact.startswith(received)
    got = http.get(path_of("llama"), headers={"Range": f"bytes={at}-{at}"})
    assert (got.status_code, got.json()["code"], got.json()["tensor"]) == (500, "corrupt-extent", "model.norm.weight")
    assert http.get(path_of("llama"), headers={"Range": "bytes=0-9000"}).content == intact[:9001]
    packed = http.get(path_of("llama"), headers={"Range": f"bytes={at}-", "Accept-Encoding": "zstd"})
    assert packed.status_code == 500


def test_damage_in_the_first_window_is_a_problem(damaged: tuple[Built, httpx.Client]) -> None:
    """The header alone would be whole, but it is not sent before the first tensors are proven."""
    built, http = damaged
    entry = built.manifest.tensors["model"]["lm_head.weight"]
    flip(built.path / entry.file, entry.start)
    got = http.get(path_of("llama"))
    assert (got.status_code, got.json()["code"]) == (500, "corrupt-extent")
    assert http.get(path_of("llama"), headers={"Accept-Encoding": "zstd"}).status_code == 500
    assert http.head(path_of("llama")).status_code == 200


def test_files_and_config_that_are_gone(damaged: tuple[Built, httpx.Client]) -> None:
    """A missing file is a problem that names it; so is a config.json that is missing, damaged, or no JSON object."""
    built, http = damaged
    config = built.path / shard_plans.CONFIG
    flip(config, 0)
    assert http.get(path_of("llama"), params={"layout": "tp=2"}).json()["code"] == "corrupt-extent"
    config.unlink()
    assert http.get(path_of("llama"), params={"layout": "tp=2"}).json()["code"] == "corrupt-manifest"
    config.write_bytes(json.dumps(MODELS["llama"].config).encode())
    assert http.get(path_of("llama"), params={"layout": "tp=2"}).status_code == 200
    for path in built.path.glob("model-*.safetensors"):
        path.unlink()
    got = http.get(path_of("llama"), params={"layout": "tp=2"})
    assert (got.status_code, got.json()["code"]) == (500, "corrupt-manifest")


def test_no_memory_stays_when_nobody_reads(tmp_path: Path) -> None:
    """Slabs are given back when the last stream has ended, also one that was broken off."""
    save(tmp_path, MODELS["llama"])
    with served(tmp_path) as running, httpx.Client(base_url=running.url, trust_env=False, headers=PLAIN) as http:
        with http.stream("GET", path_of("llama")) as response:
            body = response.iter_raw()
            next(body)
        http.get(path_of("llama"))
        wait_until(lambda: running.app.state.streams.extents.bytes == 0)  # it has still to see that one was broken off


def test_too_many_streams_are_told_to_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who finds no room in time is told so; a client that breaks off makes room again."""
    monkeypatch.setattr(shard_streams, "STREAM_WAIT_MAX_S", 0.2)
    monkeypatch.setattr(shard_streams, "WINDOW_BYTES", 2**21)
    arrays = {"model": {"big": np.arange(2**22, dtype=np.uint64)}}  # 32 MiB, more than sockets hold
    directory = tmp_path / naming.checkpoint_path("big", 5)
    build(directory, arrays, run="big", config=b"{}", file_bytes_max=2**30, extent_bytes=2**20)
    with served(tmp_path) as running, httpx.Client(base_url=running.url, trust_env=False, headers=PLAIN) as client:
        running.app.state.streams = shard_streams.ShardStreams(running.services.control.records, streams_max=1)
        with client.stream("GET", path_of("big")) as slow:
            body = slow.iter_raw()
            next(body)
            got = client.get(path_of("big"))
            assert (got.status_code, got.json()["code"], got.json()["retryable"]) == (504, "deadline-exceeded", True)
            assert client.head(path_of("big")).status_code == 200
        monkeypatch.setattr(shard_streams, "STREAM_WAIT_MAX_S", 30.0)
        assert client.get(path_of("big"), headers={"Range": "bytes=0-9"}).status_code == 206
