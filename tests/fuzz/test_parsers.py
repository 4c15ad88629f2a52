"""Readers of others' bytes: whatever comes, it is understood or refused by name, in bounded memory and time; nothing else.

The kept corpus (`corpus/<parser>/`) holds what once was not, and what we thought of. `make fuzz` looks for more.
"""

from __future__ import annotations

import hashlib
import random
import signal
import time
import traceback
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_formats.errors import LEAVES, CheckpointError

from .parsers import PARSERS, Parser

CORPUS = Path(__file__).parent / "corpus"
HANG_S = 30  # no reader takes a thousandth of it
MEMORY_BYTES_MAX = 64 * 2**20
MEMORY_RATIO_MAX = 200  # of an input's own length: objects of JSON are large
EXAMPLES = 150
SEARCH_S = 60.0  # unless --fuzz-s says otherwise


@contextmanager
def bounded() -> Iterator[None]:
    """Ends a reader that does not come back."""

    def hang(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"not read within {HANG_S} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(HANG_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check(parser: Parser, data: bytes) -> bool:
    """Whether it was understood; fails for anything but an error of a documented kind."""
    try:
        with bounded():
            parser.parse(data)
    except CheckpointError as error:
        assert type(error) in LEAVES, f"{type(error).__name__} is no error with its own code"
        assert len(str(error)) < 10_000 + 2 * len(data)
        return False
    return True


def check_memory(parser: Parser, data: bytes) -> None:
    tracemalloc.start()
    try:
        check(parser, data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MEMORY_BYTES_MAX + MEMORY_RATIO_MAX * len(data), f"{peak} bytes for {len(data)}"


def kept() -> list[tuple[Parser, Path]]:
    return [(parser, path) for parser in PARSERS for path in sorted((CORPUS / parser.name).glob("*"))]


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_valid_inputs(parser: Parser) -> None:
    """What is begun from is understood, so a mutation of it comes far."""
    assert parser.seeds
    assert all(check(parser, seed) for seed in parser.seeds)


@pytest.mark.parametrize(("parser", "path"), kept(), ids=lambda part: part.name)
def test_kept_inputs(parser: Parser, path: Path) -> None:
    """Every input that is kept is understood or refused by name, and takes memory in proportion to what it is."""
    check_memory(parser, path.read_bytes())


def test_the_corpus_is_of_readers_that_there_are() -> None:
    """No directory is left behind, and each reader of files has some."""
    names = {path.name for path in CORPUS.iterdir()}
    assert names <= {parser.name for parser in PARSERS}
    assert {"safetensors", "manifest", "commit", "run-file", "table", "arena", "wire-to-daemon", "layout", "body"} <= names


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
@settings(max_examples=EXAMPLES)
@given(seed=st.integers(0, 2**64 - 1))
def test_hostile_versions_of_valid_inputs(parser: Parser, seed: int) -> None:
    """Values, members, lengths and bytes that are others than they were."""
    chance = random.Random(seed)
    check(parser, parser.mutate(chance, chance.choice(parser.seeds)))


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
@given(data=st.binary(max_size=300))
def test_noise(parser: Parser, data: bytes) -> None:
    """Bytes that mean nothing."""
    check(parser, data)


@pytest.mark.parametrize("claimed", [99_999_999, 100_000_000, 100_000_001, 2**31, 2**63, 2**64 - 1])
@pytest.mark.parametrize("name", ["safetensors", "wire-to-daemon"])
def test_lengths_that_are_claimed_cost_nothing(name: str, claimed: int) -> None:
    """A header of 100 MB that is not there is refused before memory is had for it."""
    parser = next(parser for parser in PARSERS if parser.name == name)
    width = 8 if name.startswith("safetensors") else 4
    data = (claimed % 2 ** (8 * width)).to_bytes(width, "little") + b'{"a":'
    tracemalloc.start()
    try:
        check(parser, data)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.crash_slow
def test_search(request: pytest.FixtureRequest) -> None:
    """The long search of `make fuzz`: mutations of seeds and of what is kept, for --fuzz-s seconds; what fails is kept."""
    seconds = request.config.getoption("--fuzz-s") or SEARCH_S
    seed = random.randrange(2**64)
    chance, end, tried = random.Random(seed), time.monotonic() + seconds, 0
    known = {parser.name: [*parser.seeds, *(path.read_bytes() for p, path in kept() if p is parser)] for parser in PARSERS}
    failed: dict[str, str] = {}  # one of a kind
    while time.monotonic() < end:
        parser = chance.choice(PARSERS)
        data = parser.mutate(chance, chance.choice(known[parser.name]))
        tried += 1
        try:
            check(parser, data) if tried % 100 else check_memory(parser, data)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            kind = f"{parser.name}: {type(error).__name__} at {last.filename}:{last.lineno}: {error}"[:300]
            if kind not in failed:
                path = CORPUS / parser.name / f"found-{hashlib.sha256(data).hexdigest()[:12]}"
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(data)
                failed[kind] = str(path)
    print(f"{tried} inputs tried from seed {seed}, {len(failed)} not handled")
    assert failed == {}
