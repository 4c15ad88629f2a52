"""digest: xxh3-64, pinned to known values."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats import digest as digests
from holdfast_formats.digest import check_digest, digest, number
from holdfast_formats.errors import InvalidRequest


@pytest.mark.parametrize(
    ("data", "expected"),
    [(b"", "2d06800538d394c2"), (b"holdfast", "4ddf46ebd3ad850b"), (bytes(range(256)) * 4096, "d36c0e13a3df139e")],
)
def test_digests_are_what_they_always_were(data: bytes, expected: str) -> None:
    """Seed 0, sixteen lower-case digits; these values are on disks and may never change."""
    assert digest(data) == expected and number(data) == int(expected, 16)
    check_digest(expected)


def test_any_contiguous_buffer_has_the_digest_of_its_bytes() -> None:
    """bytes, bytearray, memoryview and arrays of any shape agree; a strided view is refused rather than copied."""
    array = np.arange(12, dtype="<u2").reshape(3, 4)
    data = array.tobytes()
    assert digest(array) == digest(data) == digest(bytearray(data)) == digest(memoryview(data))
    with pytest.raises(ValueError, match="contiguous"):
        digest(array[:, ::2])


@pytest.mark.parametrize("text", ["", "0" * 15, "0" * 17, "G" + "0" * 15, "A" * 16, " " * 16, "０" * 16, "0x" + "0" * 14])
def test_what_is_no_digest_is_refused(text: str) -> None:
    """Length, alphabet and case are exact, so that an absent digest can never pass."""
    with pytest.raises(InvalidRequest, match="not an xxh3-64 digest"):
        check_digest(text)


needs_native = pytest.mark.skipif(digests.native() is None, reason="this build of xxhash hides its functions")


@needs_native
@given(st.integers(0, 300_000), st.integers(0, 2**31))
def test_code_that_is_not_python_digests_alike(size: int, seed: int) -> None:
    """The library's own function, by its address: the number that Python gets, at any length and alignment."""
    data = np.random.default_rng(seed).integers(0, 256, size + 7, np.uint8)[7:]
    found = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t)(digests.native())
    assert found(data.ctypes.data, size) == number(data) == int(digest(data), 16)


@needs_native
def test_a_function_that_digests_otherwise_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may stand for another algorithm, or another seed, in some build."""
    monkeypatch.setattr(digests, "_NATIVE", ("XXH3_64bits_no_such", "XXH3_64bits"))
    assert digests.native.__wrapped__() is not None
    monkeypatch.setattr(digests, "number", lambda data: xxhash.xxh3_64_intdigest(data, seed=1))
    assert digests.native.__wrapped__() is None
