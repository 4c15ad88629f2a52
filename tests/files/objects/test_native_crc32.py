"""CRC-32 in C: that of zlib, for any bytes, lengths, places and beginnings."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_files.objects import checksums, native_crc32
from holdfast_files.objects.native_crc32 import BYTES_MIN

needs_library = pytest.mark.skipif(not native_crc32.available(), reason="native_crc32.c was not built here")


@needs_library
@given(st.integers(0, 2**32 - 1), st.integers(0, 300), st.integers(0, 17), st.integers(0, 2**32 - 1))
def test_it_is_that_of_zlib(seed: int, more: int, begin: int, before: int) -> None:
    """Also of bytes that begin and end anywhere, and after others."""
    data = memoryview(np.random.default_rng(seed).bytes(BYTES_MIN + more + begin))[begin:]
    assert native_crc32.crc32(data, before) == zlib.crc32(data, before)


@needs_library
@pytest.mark.parametrize("fill", [0, 255])
@pytest.mark.parametrize("count", [0, 1, BYTES_MIN - 1, BYTES_MIN, BYTES_MIN + 16, 2**20 + 5])
def test_alike_bytes(fill: int, count: int) -> None:
    assert native_crc32.crc32(bytes([fill]) * count) == zlib.crc32(bytes([fill]) * count)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The header is the same."""
    views = [memoryview(bytes(5000)), memoryview(b"x" * 3000)]
    found = checksums.crc32(views)
    monkeypatch.setattr(native_crc32, "_library", None)
    assert not native_crc32.available() and checksums.crc32(views) == found


def test_a_library_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Such as one for another machine."""
    broken = tmp_path_factory.mktemp("library") / "broken.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(native_crc32, "LIBRARY", broken)
    assert native_crc32._load() is None
