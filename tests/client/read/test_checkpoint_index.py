"""Runs and checkpoints of a service, for commands; most of it is tested by `tests/client/test_cli.py`."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.read.checkpoint_index import ServiceIndex
from holdfast.rest.api import Api
from holdfast_formats.errors import NoSuchRun
from tests.checkpoints import build_root
from tests.serving import served

MISSING = NoSuchRun("there is no run tiyn", hint="holdfast ls lists them")


@pytest.fixture
def parting() -> Iterator[str]:
    """The address of a service that answers one request, that the run is missing, and is gone."""
    body = msgspec.json.encode(MISSING.problem())
    head = f"HTTP/1.1 404 Not Found\r\nContent-Type: application/problem+json\r\nContent-Length: {len(body)}\r\n"

    def answer() -> None:
        connection, _ = listener.accept()
        listener.close()
        with connection:
            connection.recv(65_536)
            connection.sendall(f"{head}Connection: close\r\n\r\n".encode() + body)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=answer)
        thread.start()
        yield url
        thread.join()


def test_a_missing_run_comes_with_the_nearest_ones(tmp_path: Path) -> None:
    build_root(tmp_path, {"tiny": (5,)})
    with served(tmp_path) as running, Api(running.url) as api, pytest.raises(NoSuchRun) as caught:
        ServiceIndex(api).checkpoints("tiyn")
    assert "did you mean tiny?" in (caught.value.hint or "")


def test_a_missing_run_stays_the_error_where_the_others_cannot_be_listed(parting: str) -> None:
    """Its hint is the service's then. Before, the failure of the list was shown, and the missing run was not."""
    with Api(parting) as api, pytest.raises(NoSuchRun) as caught:
        ServiceIndex(api).checkpoints("tiyn")
    assert (caught.value.detail, caught.value.hint) == (MISSING.detail, MISSING.hint)
