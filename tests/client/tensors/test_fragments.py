"""Shards declared by hand: their boxes, lists of them, and what of them is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.tensors.fragments import Fragment, FragmentList, fragment_list
from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.region import Box
from tests.tiling import tiles


@st.composite
def flat_parts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, int]]:
    """A shape, a box in it (corner and shape), and a range of the box's elements."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    box = tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
    start = draw(st.integers(0, prod(box)))
    return shape, offset, box, (start, draw(st.integers(start, prod(box))))


@given(flat_parts())
def test_a_flat_range_of_a_box_is_the_run_of_its_elements(
    case: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, int]],
) -> None:
    """Its boxes, one after the other, have the elements that slicing the box out and flattening it gives."""
    shape, offset, box, (start, stop) = case
    elements = torch.arange(prod(shape)).reshape(shape)
    cut = elements[Box(offset, box).slices].reshape(-1)[start:stop]
    fragment = Fragment(cut.clone(), shape, offset=offset, box=box, flat=(start, stop))
    found = [elements[part.slices].reshape(-1) for part in fragment.boxes]
    assert len(found) <= max(2 * len(shape) - 1, 1)
    assert torch.equal(torch.cat([torch.empty(0, dtype=torch.int64), *found]), cut)
    assert fragment.with_tensor(cut.clone()).place == fragment.place


@given(flat_parts(), st.data())
def test_runs_of_a_box_tile_it(
    case: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, int]], data: st.DataObject
) -> None:
    """A box cut into runs anywhere, as a distributed optimizer does, is covered exactly by the list of them."""
    shape, _, _, _ = case
    size = prod(shape)
    cuts = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=4))})
    origin = (0,) * len(shape)
    parts = [Fragment(torch.zeros(b - a), shape, offset=origin, box=shape, flat=(a, b)) for a, b in pairwise(cuts)]
    assert tiles(FragmentList(parts, "w").boxes, shape)


NOTHING = torch.zeros(2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fragment(NOTHING, (4,)), "both an offset and a flat range, or neither"),
        (lambda: Fragment(NOTHING, (4,), offset=(0,), flat=(0, 2)), "both an offset and a flat range, or neither"),
        (lambda: Fragment(NOTHING, (4,), offset=(3,)), "outside shape"),
        (lambda: Fragment(NOTHING, (4,), offset=(0, 0)), "outside shape"),
        (lambda: Fragment(torch.zeros(3), (4,), flat=(0, 2)), "contiguous tensor of 2 elements, not one of 3"),
        (lambda: Fragment(torch.zeros(4)[::2], (4,), flat=(0, 2)), "not contiguous"),
        (lambda: Fragment(NOTHING, (4,), flat=(3, 5)), "outside a tensor"),
        (lambda: Fragment(NOTHING, (4,), box=(2,)), "box= needs offset= and flat="),
        (lambda: Fragment(NOTHING, (4,), box=(2,), offset=(0,)), "box= needs offset= and flat="),
        (lambda: Fragment(NOTHING, (4,), box=(2,), flat=(0, 2)), "box= needs offset= and flat="),
        (lambda: Fragment(NOTHING, (4, 4), offset=(3, 0), box=(2, 4), flat=(0, 2)), "outside shape"),
        (lambda: Fragment(NOTHING, (4, 4), offset=(0, 0), box=(2,), flat=(0, 2)), "outside shape"),
        (lambda: Fragment(NOTHING, (4, 4), offset=(1, 1), box=(1, 2), flat=(1, 3)), r"\[1, 3\) lies outside"),
        (lambda: Fragment(torch.zeros(3), (4, 4), offset=(1, 1), box=(2, 2), flat=(0, 2)), "2 elements, not one of 3"),
        (lambda: Fragment([1.0, 2.0], (4,), offset=(0,)), "holds a torch.Tensor, not a list"),
        (lambda: Fragment(NOTHING, (4,), offset=(0,), held=[NOTHING]), "held= is the optimizer's torch.Tensor, not a list"),
        (lambda: Fragment(NOTHING, 4, offset=(0,)), "shape of a Fragment must be a sequence of whole numbers, not 4"),
        (lambda: Fragment(NOTHING, (4,), offset=(0.5,)), "offset of a Fragment must be a sequence of whole numbers"),
        (lambda: Fragment(NOTHING, (4,), flat=(0, 1, 2)), r"is \(start, stop\), not \(0, 1, 2\)"),
    ],
)
def test_a_fragment_that_does_not_fit_is_refused(make: Callable[[], Fragment], message: str) -> None:
    """A shard outside its tensor, of another size, or described in a way that has no meaning is refused when declared."""
    with pytest.raises((InvalidRequest, StateMismatch), match=message):
        make()


def rows(tensor: torch.Tensor, at: int, shape: tuple[int, ...] = (4, 4)) -> Fragment:
    return Fragment(tensor, shape, offset=(at, 0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: [rows(torch.zeros(1, 4), 0), rows(torch.zeros(1, 4), 1, (5, 4))], r"float32 \[4, 4\] and of .*\[5, 4\]"),
        (lambda: [rows(torch.zeros(1, 4), 0), rows(torch.zeros(1, 4).half(), 1)], r"float32 \[4, 4\] and of torch.float16"),
        (
            lambda: [rows(torch.zeros(2, 4), 0), rows(torch.zeros(1, 4), 1)],
            r"\[0, 0\]\+\[2, 4\] and \[1, 0\]\+\[1, 4\] over",
        ),
        (lambda: [rows(torch.zeros(2, 4), 0), Fragment(torch.zeros(3), (4, 4), flat=(7, 10))], "overlap"),
        (lambda: [rows(NOTHING.expand(4, 2), 0, (8, 2)), rows(NOTHING.expand(4, 2), 4, (8, 2))], "share memory"),
        (lambda: (rows(torch.zeros(1, 4), 0), torch.zeros(1, 4)), "values of type Tensor among them"),
        (lambda: [rows(torch.zeros(1, 4), 0), 3, None], "values of type NoneType, int among them"),
        (lambda: [rows(torch.zeros(1, 4), 0), [rows(torch.zeros(1, 4), 1)]], "values of type list among them"),
    ],
)
def test_a_list_that_is_not_one_tensor_is_refused(make: Callable[[], Any], message: str) -> None:
    """Parts of different tensors, elements twice, memory twice, and other things in the list are refused with the path."""
    with pytest.raises(InvalidRequest, match=rf"^model\.w: .*{message}") as refused:
        fragment_list(make(), "model.w")
    assert refused.value.hint


def test_parts_of_one_local_tensor_may_lie_between_each_other():
    """Columns of one local tensor share no memory, and are one tensor; columns that share one column are refused."""
    local = torch.zeros(4, 6)
    one, two = (Fragment(local[:, a::2], (4, 12), offset=(0, 6 * a)) for a in (0, 1))
    assert fragment_list((one, two), "w").shape == (4, 12)
    left, right = Fragment(local[:, :3], (4, 12), offset=(0, 0)), Fragment(local[:, 2:], (4, 12), offset=(0, 6))
    with pytest.raises(InvalidRequest, match="share memory"):
        fragment_list([left, right], "w")


@pytest.mark.parametrize("value", [[], (), [1, 2], [torch.zeros(1)], "text", None, rows(torch.zeros(1, 4), 0), {1: 2}])
def test_other_values_are_no_list_of_fragments(value: Any) -> None:
    assert fragment_list(value, "w") is None


def test_views_of_a_moment_lie_where_the_parts_lie_in_the_parameter():
    """Whatever the strides of the parameter, each part's moment is at the part's place; another form is refused."""
    for parameter in (torch.arange(24.0).reshape(4, 6), torch.arange(24.0).reshape(6, 4).t()):
        halves = parameter[:, :2], parameter[:, 2:]
        parts = [Fragment(h, (4, 12), offset=(0, 6 * n), held=parameter) for n, h in enumerate(halves)]
        found = FragmentList(parts, "w")
        found.check_held(parameter, "optim: w")
        moment = torch.empty_like(parameter, dtype=torch.bfloat16).copy_(parameter)
        assert moment.stride() == parameter.stride()
        views = found.views_of(moment, "optim/w/exp_avg")
        assert all(torch.equal(view.float(), half) for view, half in zip(views, halves, strict=True))
        views[1].zero_()
        assert moment[:, 2:].count_nonzero() == 0 and torch.equal(moment[:, :2].float(), halves[0])
        with pytest.raises(InvalidRequest, match=r"optim/w/exp_avg: .* is not laid out as its parameter"):
            found.views_of(torch.zeros(24), "optim/w/exp_avg")


def test_an_optimizer_must_hold_the_tensor_of_which_the_parts_are_views():
    """Parts without held=, parts of other memory, and a parameter with gaps are refused by name."""
    base = torch.zeros(4, 8)
    gaps = base[:, :4]
    for parameter, halves in (
        (base, [Fragment(base[:2], (8, 8), offset=(0, 0)), Fragment(base[2:], (8, 8), offset=(4, 0))]),
        (base, [Fragment(torch.zeros(2, 8), (8, 8), offset=(4 * n, 0), held=base) for n in (0, 1)]),
        (gaps, [Fragment(gaps[2 * n :][:2], (8, 4), offset=(4 * n, 0), held=gaps) for n in (0, 1)]),
    ):
        with pytest.raises(InvalidRequest, match=r"optim: w: .* not all views of it") as refused:
            FragmentList(halves, "w").check_held(parameter, "optim: w")
        assert "held=" in refused.value.hint


def test_a_program_without_dtensors_does_not_import_them() -> None:
    """Nor torch's compiler, which making an optimizer imports: each costs a restart most of a second."""
    code = """if True:
        import sys, torch
        before = set(sys.modules)
        from holdfast import Checkpointer
        from holdfast.tensors.fragments import is_dtensor
        assert not is_dtensor(torch.ones(1))
        print(*{"torch.distributed.tensor", "torch._dynamo", "sympy"} & (set(sys.modules) - before))
    """
    assert not subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
