"""Copies past the caches: exactly the bytes asked for, and numpy's own where the library is not there."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import streaming

SPANS = st.tuples(st.integers(0, 130), st.integers(0, 130), st.integers(0, 40_000))


@pytest.fixture(params=["library", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        monkeypatch.setattr(streaming, "_library", None)
    elif not streaming.available():
        pytest.skip("the library was not built here")
    return request.param


@pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("cc") is None or "site-packages" in streaming.__file__,
    reason="needs x86-64, a compiler and an install from the source tree",
)
def test_it_is_built_where_it_can_be() -> None:
    assert streaming.available()


@given(st.lists(SPANS, max_size=5), st.integers(0, 2**31))
def test_every_byte_arrives_and_none_beside(spans: list[tuple[int, int, int]], seed: int) -> None:
    """Whatever the alignment and length of either side; what stands around the target stays as it was."""
    random = np.random.default_rng(seed)
    pairs, expected = [], []
    for before, shift, size in spans:
        around = random.integers(0, 256, before + size + 200, np.uint8)
        source = random.integers(0, 256, shift + size, np.uint8)[shift:]
        wanted = around.copy()
        wanted[before : before + size] = source
        pairs.append((around, around[before : before + size], source))
        expected.append(wanted)
    streaming.Copies([(target, source) for _, target, source in pairs]).do()
    for (around, _, _), wanted in zip(pairs, expected, strict=True):
        assert np.array_equal(around, wanted)


@pytest.mark.usefixtures("way")
def test_both_ways_copy_arrays_of_any_dtype() -> None:
    source = np.arange(100_000, dtype=np.int64).reshape(100, 1000)
    target = np.zeros_like(source)
    streaming.Copies([(target, source)]).do()
    assert np.array_equal(target, source)
    target[:] = 0
    streaming.copy(target.reshape(-1).view(np.uint8).data, source.reshape(-1).view(np.uint8).data)
    assert np.array_equal(target, source)


@pytest.mark.usefixtures("way")
def test_what_is_not_plain_is_never_copied_by_its_bytes() -> None:
    """A longer source would be written past the target's end."""
    small, large, strided = np.zeros(10_000, np.uint8), np.ones(20_000, np.uint8), np.ones(20_000, np.uint8)[::2]
    for source in (large, strided, small.view(np.int64)):
        with pytest.raises(ValueError, match="plain"):
            streaming.Copies([(small, source)])
    for source in (large.data, large.data[:100]):
        with pytest.raises(ValueError):
            streaming.copy(small.data, source)
    assert not small.any()
    with pytest.raises(ValueError):
        streaming.copy(small.data.toreadonly(), large.data[:10_000])
    assert not small.any()


@given(
    st.lists(
        st.tuples(st.sampled_from(["u1", "i2", "i4", "i8"]), st.lists(st.integers(0, 5), max_size=3), st.booleans()),
        max_size=6,
    ),
    st.integers(0, 2**31),
)
def test_words_are_the_elements_of_all_views_in_order(kinds: list[tuple[str, list[int], bool]], seed: int) -> None:
    """Of any width, shape and stride, as they are at that moment; with the library and without it."""
    random = np.random.default_rng(seed)
    views = []
    for dtype, shape, strided in kinds:
        whole = random.integers(0, 100, [n * 2 for n in shape]).astype(dtype)
        views.append(whole[(..., *(slice(None, None, -2) for _ in shape))].T if strided else whole)
    words = streaming.Words(views)
    for _ in range(2):
        expected = [int(value) for view in views for value in view.reshape(-1)]
        assert np.frombuffer(words.now(), np.uint64).tolist() == expected
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(streaming, "_library", None)
            assert np.frombuffer(words.now(), np.uint64).tolist() == expected
        assert words.sizes == [view.size for view in views]
        for view in views:
            view += 1


def test_other_threads_run_meanwhile() -> None:
    """Copying holds no lock of the interpreter: another thread counts on while one long copy goes on."""
    source, target = np.ones(2**28, np.uint8), np.zeros(2**28, np.uint8)
    copies, started, ended, counted = streaming.Copies([(target, source)]), threading.Event(), threading.Event(), 0

    def work() -> None:
        started.set()
        copies.do()
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    while not ended.is_set():
        counted += 1
    thread.join()
    assert counted > 100 and target.all()


def test_a_machine_without_a_compiler_gets_a_package_that_copies_with_numpy(tmp_path: Path) -> None:
    """A file that is no library of this machine is not used, and nothing fails."""
    broken = tmp_path / "_streaming.so"
    broken.write_bytes(b"not a library")
    code = f"""
import pathlib
from holdfast import streaming
streaming.LIBRARY = pathlib.Path({str(broken)!r})
assert streaming._load() is None
streaming.LIBRARY = pathlib.Path({str(tmp_path / "absent.so")!r})
assert streaming._load() is None
"""
    subprocess.run([sys.executable, "-c", code], check=True)
