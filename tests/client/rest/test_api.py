"""The typed client, against the real service."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import uvicorn

from holdfast.rest import api as api_module
from holdfast.rest.api import Api
from holdfast_formats import naming
from holdfast_formats.errors import (
    CorruptExtent,
    DaemonGone,
    InvalidRequest,
    NoSuchCheckpoint,
    NoSuchResource,
    NoSuchRun,
    StorageFailed,
)
from tests.checkpoints import build_root, flip
from tests.serving import Served, served


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Served]:
    build_root(tmp_path, {"tiny": (5, 10, 15), "other": (1,)})
    with served(tmp_path) as running:
        yield running


@pytest.fixture
def api(service: Served) -> Iterator[Api]:
    with Api(service.url + "/") as connected:
        yield connected


def test_lists_go_on_over_pages(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists are whole, however small a page is."""
    monkeypatch.setattr(api_module, "PAGE_ITEMS", 2)
    assert [run.name for run in api.runs()] == ["other", "tiny"]
    assert [made.step for made in api.checkpoints("tiny")] == [15, 10, 5]
    assert len(list(api.tensors("tiny"))) == 9
    assert {tensor.group for tensor in api.tensors("tiny", 5, "optim")} == {"optim"}
    assert naming.COMMIT in [file.name for file in api.files("tiny", 5)]


def test_single_items(api: Api, service: Served) -> None:
    """Runs, checkpoints, manifest, nodes and health come as their models."""
    assert api.run("tiny").newest == api.checkpoint("tiny").step == 15
    stored = (service.root / naming.checkpoint_path("tiny", 10) / naming.MANIFEST).read_bytes()
    assert api.manifest_bytes("tiny", 10) == stored
    assert [node.name for node in api.nodes()] == ["node-1"]
    assert list(api.rounds("tiny", "open")) == []
    assert api.health().version == "9.9"


def test_remove(api: Api) -> None:
    """What is removed is gone."""
    api.remove("tiny", 5)
    assert [made.step for made in api.checkpoints("tiny")] == [15, 10]
    with pytest.raises(NoSuchCheckpoint):
        api.remove("tiny", 5)


def test_problems_come_back_as_the_errors_they_were(api: Api, service: Served) -> None:
    """The class, the hint and the members survive the way."""
    with pytest.raises(NoSuchRun):
        api.run("nope")
    with pytest.raises(NoSuchCheckpoint):
        api.checkpoint("tiny", 6)
    with pytest.raises(InvalidRequest):
        list(api.rounds(state="done"))
    with pytest.raises(NoSuchResource):
        api.file_range("tiny", 5, "../../run.json", 0, memoryview(bytearray(4)))
    directory = service.root / naming.checkpoint_path("tiny", 5)
    flip(directory / naming.STATE, 0)
    with pytest.raises(CorruptExtent) as caught:
        api.file_range("tiny", 5, naming.STATE, 0, memoryview(bytearray(4)))
    assert caught.value.members["file"] == naming.STATE
    assert caught.value.hint


def test_file_range(api: Api, service: Served) -> None:
    """A range fills the buffer, and less of it only at the file's end."""
    data = (service.root / naming.checkpoint_path("tiny", 5) / naming.STATE).read_bytes()
    buffer = bytearray(len(data))
    assert api.file_range("tiny", 5, naming.STATE, 10, memoryview(buffer)) == len(data) - 10
    assert buffer[: len(data) - 10] == data[10:]
    assert api.file_range("tiny", 5, naming.STATE, len(data), memoryview(buffer)) == 0
    assert api.file_range("tiny", 5, naming.STATE, 0, memoryview(b"")) == 0


def test_cut_transfer_ends_with_the_damage_by_name(api: Api, service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the service cuts a transfer because of damage, the client goes on from there and gets the problem."""
    monkeypatch.setattr(
        "holdfast_formats.disk.verification.batches",
        lambda listed: (of[i : i + 1] for of in listed for i in range(len(of))),
    )
    directory = service.root / naming.checkpoint_path("tiny", 5)
    path = max(directory.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    size = path.stat().st_size
    flip(path, size - 1)
    with pytest.raises(CorruptExtent) as caught:
        api.file_range("tiny", 5, path.name, 0, memoryview(bytearray(size)))
    assert caught.value.members["offset"] + caught.value.members["length"] == size


def test_nobody_there() -> None:
    """A refused connection is DaemonGone, with what to do."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with Api(f"http://127.0.0.1:{port}") as api, pytest.raises(DaemonGone, match="holdfast serve"):
        api.health()


def test_a_connection_is_given_up_before_the_service_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was unused for as long as the service bears it is hung up on in the moment of the next request."""
    assert uvicorn.Config("app").timeout_keep_alive >= 2 * api_module.IDLE_S
    monkeypatch.setattr(api_module, "IDLE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(65_536)
                        body = b'{"status":"ok"}'
                        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                        connection.recv(65_536)  # and no answer

        threading.Thread(target=serve, daemon=True).start()
        with Api(f"http://127.0.0.1:{listener.getsockname()[1]}") as api:
            for _ in range(2):
                assert api.health().status == "ok"
                time.sleep(0.2)


def test_something_else_there(service: Served) -> None:
    """An answer that is not this API's is StorageFailed, and not a crash."""
    with Api(f"{service.url}/openapi.json") as api, pytest.raises((StorageFailed, NoSuchResource)):
        api.health()
