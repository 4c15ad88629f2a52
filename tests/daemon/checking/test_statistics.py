"""measure: what it says of any bytes is what numpy says of the numbers they are."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_formats import dtypes
from holdfast_formats.rest.statistics import PartStatistics, listed, merge
from holdfast_service.daemon.checking import statistics
from holdfast_service.daemon.checking.statistics import measure, measure_alike

NUMBERS = [name for name in dtypes.BITS if name not in ("F4", "F6_E2M3", "F6_E3M2", "C64")]
PRECISION = 2e-6
SPECIAL = {
    "F64": [np.nan, np.inf, -np.inf, 5e-324, 1.7e308, -1.7e308, 0.0, -0.0, 1e-200, 1.0],
    "F32": [np.nan, np.inf, -np.inf, 1e-45, 3e38, -3e38, 0.0, -0.0, 1e-30, 1.0],
}


def wide(dtype: str, data: np.ndarray) -> np.ndarray:
    """The numbers, in the widest floats there are."""
    kind = np.dtype(np.uint8) if dtype == "BOOL" else dtypes.to_numpy(dtype)
    numbers = data.view(kind)
    with np.errstate(invalid="ignore"):  # a NaN that signals
        narrow = numbers if numbers.dtype.kind in "fiu" else numbers.astype(np.float32)
        return narrow.astype(np.longdouble)


def check(dtype: str, data: np.ndarray, part: PartStatistics) -> None:
    """The part is what numpy finds."""
    numbers = wide(dtype, data)
    finite = numbers[np.isfinite(numbers)]
    assert part.finite == finite.size
    assert part.nan == np.isnan(numbers).sum()
    assert part.inf == np.isinf(numbers).sum()
    assert part.zeros == (numbers == 0).sum()
    if not finite.size:
        return
    assert (part.minimum, part.maximum) == (float(finite.min()), float(finite.max()))
    size = float(np.abs(finite).mean())
    assert part.mean == pytest.approx(float(finite.mean()), rel=PRECISION, abs=PRECISION * size + 1e-322)
    close(part.norm, np.sqrt((finite**2).sum()))


def close(found: float | None, exact: np.longdouble) -> None:
    assert found is not None
    if exact < np.finfo(np.float64).max:
        assert found == pytest.approx(float(exact), rel=PRECISION, abs=1e-320)


@st.composite
def contents(draw: st.DrawFn) -> tuple[str, np.ndarray]:
    """A dtype and any bytes of it: of random bits, so NaN of any payload and subnormals are among them, or special ones."""
    dtype = draw(st.sampled_from(NUMBERS))
    width = dtypes.bits(dtype) // 8
    if dtype in SPECIAL and draw(st.booleans()):
        values = draw(st.lists(st.sampled_from(SPECIAL[dtype]), max_size=40))
        return dtype, np.array(values, dtypes.to_numpy(dtype)).view(np.uint8)
    raw = draw(st.binary(max_size=40 * width))
    data = np.frombuffer(raw[: len(raw) - len(raw) % width], np.uint8)
    return dtype, data & 1 if dtype == "BOOL" else data


@given(contents(), st.data())
def test_any_bytes(held: tuple[str, np.ndarray], data: st.DataObject) -> None:
    """Also where the bytes begin at an odd address, and in parts that are cut anywhere between two elements."""
    dtype, plain = held
    width = dtypes.bits(dtype) // 8
    odd = np.empty(plain.nbytes + 1, np.uint8)[1:]
    odd[:] = plain
    check(dtype, plain, measure(dtype, odd))
    cut = width * data.draw(st.integers(0, plain.nbytes // width))
    check(dtype, plain, merge([measure(dtype, plain[:cut]), measure(dtype, plain[cut:])]))


@given(contents(), st.integers(1, 9), st.integers(0, 2**32))
def test_parts_that_are_measured_together(held: tuple[str, np.ndarray], elements: int, seed: int) -> None:
    """Each is what it is alone, bit for bit: several nodes read other parts together than one does."""
    dtype, plain = held
    size = elements * dtypes.bits(dtype) // 8
    parts = [plain[at : at + size] for at in range(0, plain.nbytes - plain.nbytes % size, size)]
    if not parts:
        return
    before = [parts[number] for number in np.random.default_rng(seed).permutation(len(parts))]
    assert repr(listed(measure_alike(dtype, parts))) == repr([measure(dtype, part) for part in parts])
    assert repr(listed(measure_alike(dtype, np.stack(parts)))) == repr([measure(dtype, part) for part in parts])
    alone = [measure(dtype, *pair) for pair in zip(parts, before, strict=True)]
    assert repr(listed(measure_alike(dtype, parts, before))) == repr(alone)


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("elements", [1000, 1024, 3000, statistics.BLOCK // 3, statistics.BLOCK + 7])
def test_long_parts_that_are_measured_together(dtype: str, elements: int) -> None:
    """Longer than a run of products, with and without a rest, and longer than a block; with NaN, or zeros alone."""
    rng = np.random.default_rng(5)
    raw = rng.integers(0, 256, 7 * elements * dtypes.bits(dtype) // 8, np.uint8)
    parts = np.split(raw & 1 if dtype == "BOOL" else raw, 7)
    parts[3] = np.zeros_like(parts[3])
    assert repr(listed(measure_alike(dtype, parts))) == repr([measure(dtype, part) for part in parts])
    moved = listed(measure_alike(dtype, parts, parts[::-1]))
    assert repr(moved) == repr([measure(dtype, *pair) for pair in zip(parts, parts[::-1], strict=True)])
    for data, part in zip(parts, moved, strict=True):
        if dtype not in ("F64", "F32", "BF16"):  # of random bits: magnitudes that no sum of theirs can say
            check(dtype, data, part)


@given(contents(), st.randoms(use_true_random=False))
def test_change(held: tuple[str, np.ndarray], random: object) -> None:
    """The norm of the difference of what is finite before and after, however large or small it is."""
    dtype, now = held
    width = dtypes.bits(dtype) // 8
    order = list(range(now.nbytes // width))
    random.shuffle(order)  # type: ignore[attr-defined]
    before = now.reshape(-1, width)[order].reshape(-1) if order else now
    with np.errstate(invalid="ignore", over="ignore"):  # a difference that no F64 can say
        moved = wide(dtype, now) - wide(dtype, before)
        moved = moved[np.isfinite(moved) & np.isfinite(moved.astype(np.float64))]
    part = measure(dtype, now, before)
    if now.nbytes:
        close(part.change, np.sqrt((moved**2).sum()))
        check(dtype, now, part)


@pytest.mark.parametrize("scale", [5e-324, 1e-310, 1e-200, 1e-30, 1.0, 1e30, 1e200, 1e307])
@pytest.mark.parametrize("dtype", ["F32", "F64"])
def test_numbers_whose_squares_do_not_fit(dtype: str, scale: float) -> None:
    """Norms and changes of the largest and the smallest numbers neither overflow nor vanish."""
    with np.errstate(all="ignore"):
        now = (np.arange(-3, 9) * scale).astype(dtypes.to_numpy(dtype))
        before = (np.arange(-3, 9)[::-1] * scale).astype(dtypes.to_numpy(dtype))
        moved = wide(dtype, now.view(np.uint8)) - wide(dtype, before.view(np.uint8))
    part = measure(dtype, now.view(np.uint8), before.view(np.uint8))
    check(dtype, now.view(np.uint8), part)
    close(part.change, np.sqrt((moved[np.isfinite(moved)] ** 2).sum()))


@pytest.mark.parametrize("dtype", NUMBERS)
def test_many_blocks(dtype: str) -> None:
    """Several blocks and a rest, as a training state has them."""
    rng = np.random.default_rng(7)
    size = 2 * statistics.BLOCK + 1023
    kind = np.dtype(np.uint8) if dtype == "BOOL" else dtypes.to_numpy(dtype)
    numbers = rng.standard_normal(size).astype(np.float32)
    numbers = (np.abs(numbers) * 30 if kind.kind == "u" else numbers * (30 if kind.kind == "i" else 0.02)).astype(kind)
    data = numbers.view(np.uint8)
    if dtype == "BOOL":
        data = data & 1
    part = measure(dtype, data, np.roll(data.reshape(size, -1), 1, axis=0).reshape(-1))
    check(dtype, data, part)
    moved = wide(dtype, data) - np.roll(wide(dtype, data), 1)
    if np.isfinite(moved).all():
        close(part.change, np.sqrt((moved**2).sum()))


@pytest.mark.parametrize(("dtype", "width"), [("F4", 1), ("F6_E2M3", 3), ("C64", 8)])
def test_what_has_no_numbers(dtype: str, width: int) -> None:
    """Complex numbers and floats of less than a byte are not counted."""
    assert measure(dtype, np.zeros(width * 4, np.uint8)) == PartStatistics(change=None)


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_same_in_every_thread(seed: int) -> None:
    """Threads measure beside each other, each with memory of its own."""
    data = np.random.default_rng(seed).standard_normal((4, 3 * statistics.BLOCK)).astype(np.float32)
    alone = [measure("F32", row.view(np.uint8)) for row in data]
    found: dict[int, PartStatistics] = {}
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: measure("F32", data[i].view(np.uint8))})) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(4)] == alone
    assert all(math.isfinite(part.norm) for part in alone)
