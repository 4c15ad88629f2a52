"""Copies past the caches: exactly the bytes asked for, and numpy's own where the library is not there."""

from __future__ import annotations

import mmap
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.memory import native_copy

SPANS = st.tuples(st.integers(0, 130), st.integers(0, 130), st.integers(0, 40_000))


@pytest.fixture(params=["library", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        monkeypatch.setattr(native_copy, "_library", None)
    elif not native_copy.available():
        pytest.skip("the library was not built here")
    return request.param


@pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("cc") is None or "site-packages" in native_copy.__file__,
    reason="needs x86-64, a compiler and an install from the source tree",
)
def test_it_is_built_where_it_can_be() -> None:
    assert native_copy.available()


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
    native_copy.PairCopies([(target, source) for _, target, source in pairs]).do()
    for (around, _, _), wanted in zip(pairs, expected, strict=True):
        assert np.array_equal(around, wanted)


@pytest.mark.usefixtures("way")
def test_both_ways_copy_arrays_of_any_dtype() -> None:
    source = np.arange(100_000, dtype=np.int64).reshape(100, 1000)
    target = np.zeros_like(source)
    native_copy.PairCopies([(target, source)]).do()
    assert np.array_equal(target, source)
    target[:] = 0
    native_copy.copy(target.reshape(-1).view(np.uint8).data, source.reshape(-1).view(np.uint8).data)
    assert np.array_equal(target, source)


@pytest.mark.usefixtures("way")
def test_what_is_not_plain_is_never_copied_by_its_bytes() -> None:
    """A longer source would be written past the target's end."""
    small, large, strided = np.zeros(10_000, np.uint8), np.ones(20_000, np.uint8), np.ones(20_000, np.uint8)[::2]
    for source in (large, strided, small.view(np.int64)):
        with pytest.raises(ValueError, match="plain"):
            native_copy.PairCopies([(small, source)])
    for source in (large.data, large.data[:100]):
        with pytest.raises(ValueError):
            native_copy.copy(small.data, source)
    assert not small.any()
    with pytest.raises(ValueError):
        native_copy.copy(small.data.toreadonly(), large.data[:10_000])
    assert not small.any()


LENGTHS = st.one_of(st.integers(1, 40), st.integers(500, 530), st.integers(1, 20_000))


def note(parts: Sequence[native_copy.Noted], seed: int) -> None:
    for part, words in zip(parts, native_copy.NotedSources(parts).read(seed), strict=True):
        part.noted(words)


@given(st.lists(st.tuples(LENGTHS, st.integers(0, 7)), min_size=1, max_size=70), st.sampled_from([8, 512, 4096]), st.data())
def test_what_is_noted_and_then_changed_is_found_out_either_way(
    spans: list[tuple[int, int]], stretch: int, data: st.DataObject
) -> None:
    """A change of any byte of a noted word is seen when all has been copied, by the library and by numpy; no other is.
    Renewed targets get it too, and it is said which of them were written.
    """
    renew = data.draw(st.booleans())
    seed = data.draw(st.integers(0, 2**60))
    sources = [np.random.default_rng(size).integers(0, 256, shift + size, np.uint8)[shift:] for size, shift in spans]
    changed = data.draw(st.integers(0, len(spans) - 1))
    number = sum(-(-len(source) // stretch) for source in sources[:changed])
    looked = native_copy.places(len(sources[changed]), stretch, seed, number)
    words = {int(at) + i for at in looked for i in range(8)}
    cut = data.draw(st.integers(0, len(spans)))
    at = data.draw(st.integers(0, len(sources[changed]) - 1))
    for library in (native_copy._library, None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native_copy, "_library", library)
            targets = [np.zeros_like(source) for source in sources]
            pairs = list(zip(targets, sources, strict=True))
            parts = [native_copy.Noted(some, stretch) for some in (pairs[:cut], pairs[cut:])]
            note(parts, seed)
            assert not any(part.copy(renew).changed.any() for part in parts)
            assert all(np.array_equal(*pair) for pair in zip(targets, sources, strict=True))
            note(parts, seed)
            sources[changed][at] ^= 1
            said = [part.copy(renew) for part in parts]
            assert [found for one in said for found in one.changed] == [
                n == changed and at in words for n in range(len(sources))
            ]
            assert [wrote for one in said for wrote in one.wrote] == [n == changed or not renew for n in range(len(sources))]
            assert np.array_equal(targets[changed], sources[changed])
            assert all(native_copy.alike(parts, seed)) and not any(part.differing().any() for part in parts)
            targets[changed][at] ^= 4
            assert [one for part in parts for one in part.differing()] == [n == changed for n in range(len(sources))]
            targets[changed][:] = ~sources[changed]
            assert native_copy.alike(parts, seed) == [changed >= cut, changed < cut]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("value", [0, 7])
def test_what_a_target_has_already_is_not_written(value: int) -> None:
    """Pages of a private mapping that were never written show what is written into its file later; in others, -0.0 counts
    as another value than 0.0.
    """
    with tempfile.TemporaryFile() as file:
        file.write(bytes(2**20))
        file.flush()
        target = np.frombuffer(mmap.mmap(file.fileno(), 2**20, flags=mmap.MAP_PRIVATE), np.uint8)
        source = np.zeros(2**20, np.uint8)
        source[2**19] = value
        noted = native_copy.Noted([(target, source)], 2**12)
        note([noted], 5)
        assert noted.copy(renew=True).wrote.tolist() == [value > 0]
        assert np.array_equal(target, source)
        os.pwrite(file.fileno(), b"\1" * 2**20, 0)
        shown = int(target.sum(dtype=np.int64)) - value
        assert shown == 2**20 if not value else shown < 2**20
    zero, minus = np.zeros(1000), np.full(1000, -0.0)
    noted = native_copy.Noted([(zero, minus)], 512)
    note([noted], 5)
    assert noted.copy(renew=True).wrote.all() and np.signbit(zero).all()


@given(st.integers(1, 10_000), st.sampled_from([8, 512, 4096]), st.integers(0, 2**60), st.integers(0, 1000))
def test_every_stretch_has_a_word(size: int, stretch: int, seed: int, number: int) -> None:
    """So all of two stretches in a row cannot change unseen; and other seeds draw other places."""
    places = native_copy.places(size, stretch, seed, number)
    assert len(places) == -(-size // stretch)
    for index, at in enumerate(places.tolist()):
        assert at + min(size, 8) <= size and at < (index + 1) * stretch and at + 8 > index * stretch
    if stretch > 8 and len(places) > 8:
        assert places.tolist() != native_copy.places(size, stretch, seed + 2**40, number).tolist()


def test_other_threads_run_meanwhile() -> None:
    """Copying holds no lock of the interpreter: another thread counts on while one long copy goes on."""
    source, target = np.ones(2**28, np.uint8), np.zeros(2**28, np.uint8)
    copies, started, ended, counted = native_copy.PairCopies([(target, source)]), threading.Event(), threading.Event(), 0

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
    broken = tmp_path / "_native_copy.so"
    broken.write_bytes(b"not a library")
    code = f"""
import pathlib
from holdfast.memory import native_copy
native_copy.LIBRARY = pathlib.Path({str(broken)!r})
assert native_copy._load() is None
native_copy.LIBRARY = pathlib.Path({str(tmp_path / "absent.so")!r})
assert native_copy._load() is None
"""
    subprocess.run([sys.executable, "-c", code], check=True)
