"""Sockets whose paths are longer than an address of the kernel."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast_formats.staging.socket_paths import PATH_BYTES_MAX, addressable


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory with a short path, whatever those of tests are like."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        yield Path(made)


@pytest.mark.parametrize("length", [PATH_BYTES_MAX, PATH_BYTES_MAX + 1, 1000])
def test_a_socket_is_bound_and_reached_at_any_path(short: Path, length: int) -> None:
    """Short ones by their own name; the descriptor of a longer one's directory is closed again."""
    room = length - len(os.fsencode(short)) - len("//socket")
    path = short / "/".join("d" * min(100, room - at) for at in range(0, room, 101)) / "socket"
    path = path.with_name("socket" + "t" * (length - len(os.fsencode(path))))
    path.parent.mkdir(parents=True)
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as caller:
        with addressable(path) as name:
            assert (name == str(path)) == (length <= PATH_BYTES_MAX)
            listener.bind(name)
        listener.listen()
        with addressable(path) as name:
            caller.connect(name)
        assert path.is_socket() and len(os.listdir("/proc/self/fd")) == before + 2
