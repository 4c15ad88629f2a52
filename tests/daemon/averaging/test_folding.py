"""An update folded into an accumulator: torch's own bits, and the same ones wherever a daemon dies."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.staging import average
from holdfast_formats.staging.arena import SegmentOwner, SlotState
from holdfast_formats.staging.average import AverageRule, AverageState, AverageStretch, AverageUpdate
from holdfast_service.daemon.arena.average_segment import AverageSegment
from holdfast_service.daemon.arena.segment import memfd
from holdfast_service.daemon.averaging import folding, native_lerp
from holdfast_service.daemon.averaging.folding import Lerp, chunks, fold

OWNER = SegmentOwner("r", 0, 1, 1)
SIZE = 5_000
WHOLE = (AverageStretch(0, SIZE, "F32"),)
RULE = AverageRule("master", 0.9, 1, "none")


@pytest.fixture(autouse=True, scope="module", params=["in C", "with numpy"])
def arithmetic(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test is of both; without a compiler, only of one."""
    if request.param == "in C" and not native_lerp.available():
        pytest.skip("native_lerp.c was not built here")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "with numpy":
            patch.setattr(native_lerp, "_library", None)
        yield


@pytest.fixture
def segment() -> Iterator[AverageSegment]:
    """An average of nothing, in chunks of a page."""
    made = make()
    yield made
    made.close()


def make(chunk_bytes: int = 4096) -> AverageSegment:
    geometry = average.geometry(4 * SIZE, 4096, chunk_bytes)
    return AverageSegment.make(memfd("test", geometry.segment_bytes), geometry, OWNER, "average-test")


def bring(
    segment: AverageSegment,
    number: int,
    content: NDArray,
    stretches: tuple[AverageStretch, ...] = WHOLE,
    seed=None,
    rule=RULE,
) -> None:
    """The rank's part: its update is sealed."""
    average.take(segment.memory, number)
    octets = content.view(np.uint8)
    segment.brought(0, len(octets))[:] = octets
    update = AverageUpdate(OWNER, number, 10 * number, rule, "layout", stretches, seed)
    average.seal(segment.memory, segment.geometry, number, average.encode_update(update))


def kept(segment: AverageSegment) -> NDArray[np.float32]:
    return segment.kept(0, 4 * SIZE).view(np.float32).copy()


def content(number: int) -> NDArray[np.float32]:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(number)).numpy()


@pytest.mark.parametrize("correction", ["none", "bias"])
@pytest.mark.parametrize("decay", [0.0, 0.3, 0.5, 0.9, 0.9999])
def test_a_fold_is_torchs_lerp(segment: AverageSegment, decay: float, correction: str) -> None:
    """Every bit, for weights on both sides of one half, where torch computes from the other end."""
    rule = AverageRule("master", decay, 1, correction)
    reference = torch.zeros(SIZE)
    for number in range(1, 12):
        new = torch.from_numpy(content(number))
        reference = new.clone() if number == 1 else reference.lerp_(new, rule.weight(number))
        bring(segment, number, new.numpy(), rule=rule)
        fold(segment, segment.update())
        assert np.array_equal(kept(segment).view(np.uint32), reference.numpy().view(np.uint32))
    record = segment.record
    assert (record.n, record.own, record.folded, record.step) == (11, 11, 11, 110)
    assert segment.header.state is SlotState.FREE


def test_the_corrected_average_of_a_constant_is_the_constant() -> None:
    """And of two values it is their weighted mean, which a plain one is only after very many updates."""
    rule = AverageRule("master", 0.9, 1)
    assert rule.weight(1) == 1.0
    assert rule.weight(2) == pytest.approx(1 / 1.9)
    assert rule.weight(10**6) == pytest.approx(0.1)


@given(st.lists(st.tuples(*[st.floats(-1e6, 1e6, width=32)] * 2), min_size=1, max_size=20), st.floats(0, 0.5, width=32))
def test_an_element_is_rounded_once(pairs: list, weight: float) -> None:
    """Product and sum are exact until the end: float64 alone would round twice where its own rounding makes a tie."""
    old, new = (np.array(column, np.float32) for column in zip(*pairs, strict=True))
    got = np.empty_like(old)
    Lerp(weight)(old, new, got)
    near = weight < 0.5
    factor = Fraction(float(np.float32(weight))) if near else -Fraction(float(np.float32(1) - np.float32(weight)))
    for a, b, found in zip(old, new, got, strict=True):
        exact = Fraction(float(a if near else b)) + factor * Fraction(float(np.float32(b - a)))
        error = abs(Fraction(float(found)) - exact)
        neighbours = (np.nextafter(found, np.float32(side)) for side in (-np.inf, np.inf))
        assert all(abs(Fraction(float(one)) - exact) >= error for one in neighbours)


def test_a_tie_that_float64_makes_is_seen() -> None:
    """The exact sum lies beside the middle of two F32, by less than float64 can tell."""
    old, new = np.array([1.0], np.float32), np.array([1.0 + 2.0**-23], np.float32)
    for weight, expected in ((0.25, 1.0), (0.4999, 1.0)):
        got = np.empty_like(old)
        Lerp(weight)(old, new, got)
        assert got[0] == expected
    product, addend = np.array([2.0**-24 + 2.0**-60]), np.array([1.0])
    total = product + addend
    assert np.float32(total[0]) == np.float32(1.0)  # rounded twice
    assert np.float32(folding._untied(product, addend, total)[0]) == np.float32(1 + 2.0**-23)


def test_half_precision_is_widened_and_bytes_are_taken_over(segment: AverageSegment) -> None:
    """BF16 and F16 are averaged as F32; a buffer of integers is the last one that came."""
    stretches = (AverageStretch(0, 10, "BF16"), AverageStretch(64, 10, "F16"), AverageStretch(128, 24, "U8"))
    for number in (1, 2):
        values = torch.linspace(-2, 2, 10) * number
        octets = np.zeros(256, np.uint8)
        octets[:20] = values.bfloat16().view(torch.uint8).numpy()
        octets[64:84] = values.half().view(torch.uint8).numpy()
        octets[128:152] = number
        bring(segment, number, octets, stretches)
        fold(segment, segment.update())
    for at, dtype in ((0, torch.bfloat16), (64, torch.float16)):
        first, second = (torch.linspace(-2, 2, 10).mul(n).to(dtype).float() for n in (1, 2))
        assert np.array_equal(segment.kept(at, 40).view(np.float32), first.lerp(second, 1 - 0.9).numpy())
    assert (segment.kept(128, 24) == 2).all()


class Killed(BaseException):
    """As if the process had been killed here."""


def killed_after(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """Everything that a fold writes, one after the other: it ends after so many of them, and in the middle of copies."""
    left = itertools.count(calls, -1)

    def stopping(act: Callable) -> Callable:
        def run(*given: object) -> object:
            if next(left) <= 0:
                raise Killed
            return act(*given)

        return run

    def copied_by_half(segment: AverageSegment, chunk: folding.FoldChunk, number: int, index: int) -> None:
        half = chunk.kept_bytes // 2
        segment.kept(chunk.offset, half)[:] = segment.journal(half)
        stopping(copy)(segment, chunk, number, index)

    copy = folding._copy
    monkeypatch.setattr(folding, "_copy", copied_by_half)
    for module, name in ((folding, "widened"), (average, "note_journaled"), (average, "note_copied"), (folding, "_after")):
        monkeypatch.setattr(module, name, stopping(getattr(module, name)))
    monkeypatch.setattr(AverageSegment, "free", stopping(AverageSegment.free))


def test_killed_anywhere_the_same_bits_come_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after every note, and within every copy; twice in a row as well."""
    reference = torch.from_numpy(content(1)).lerp(torch.from_numpy(content(2)), 1 - 0.9).numpy()
    for calls in itertools.count(1):
        segment = make()
        bring(segment, 1, content(1))
        fold(segment, segment.update())
        bring(segment, 2, content(2))
        ended = True
        for more in (0, 2):
            with monkeypatch.context() as patch:
                killed_after(patch, calls + more)
                try:
                    if segment.record.number < 2:
                        fold(segment, segment.update())
                except Killed:
                    ended = False
        if segment.record.number < 2:
            fold(segment, segment.update())
        assert np.array_equal(kept(segment), reference), calls
        assert segment.record.n == 2
        segment.close()
        if ended:
            assert calls > 10
            return


def test_a_seed_sets_the_average_and_its_counts(segment: AverageSegment) -> None:
    """What a checkpoint had goes on from its n; a seed of nothing begins anew."""
    bring(segment, 1, content(9))
    fold(segment, segment.update())
    state = AverageState("master", 0.9, 1, "none", n=70, step=700, dropped=3, skipped=2, lost=1)
    bring(segment, 2, content(1), seed=state)
    fold(segment, segment.update())
    assert np.array_equal(kept(segment), content(1))
    bring(segment, 3, content(2))
    fold(segment, segment.update())
    assert np.array_equal(kept(segment), torch.from_numpy(content(1)).lerp(torch.from_numpy(content(2)), 1 - 0.9).numpy())
    record = segment.record
    assert (record.n, record.own, record.seeded, record.dropped, record.skipped, record.lost) == (71, 1, 2, 3, 2, 1)
    bring(segment, 4, content(3), (), seed=AverageState("master", 0.9, 1, "none", n=0, step=0))
    fold(segment, segment.update())
    bring(segment, 5, content(4))
    fold(segment, segment.update())
    assert segment.record.n == 1
    assert np.array_equal(kept(segment), content(4))


def test_small_neighbours_are_one_chunk_and_long_ones_several() -> None:
    """Chunks cover what stretches cover, and are of the length that was asked for at most."""
    many = tuple(AverageStretch(64 * i, 16, "F32") for i in range(1000))
    assert [chunk.length for chunk in chunks(many, 2**20)] == [16_000]
    assert sum(chunk.length for chunk in chunks(many, 4096)) == 16_000
    assert max(chunk.kept_bytes for chunk in chunks(many, 4096)) == 4096
    assert [c.source for c in chunks((AverageStretch(0, 3000, "BF16"),), 4096)] == [0, 2048, 4096]
    assert [c.offset for c in chunks((AverageStretch(0, 3000, "BF16"),), 4096)] == [0, 4096, 8192]


def test_an_update_that_is_not_what_was_sealed_is_refused(segment: AverageSegment) -> None:
    """Its table is checked by its digest, and its stretches by the room that there is."""
    bring(segment, 1, content(1))
    segment.memory[5 * 4096] ^= 1
    with pytest.raises(InvalidRequest, match="differs from the sealed one"):
        segment.update()
    bring(segment, 2, content(1), (AverageStretch(0, SIZE + 4096, "F32"),))
    with pytest.raises(InvalidRequest, match="longer than its room"):
        segment.update()
    bring(segment, 3, content(1), (AverageStretch(0, 10, "F32"), AverageStretch(8, 10, "F32")))
    with pytest.raises(InvalidRequest, match="overlaps"):
        segment.update()
