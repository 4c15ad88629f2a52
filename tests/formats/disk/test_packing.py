"""layout: which file holds which tensor, from names, dtypes and shapes alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import safetensors as library
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.disk import packing, safetensors
from holdfast_formats.errors import InvalidRequest, LimitExceeded, StateMismatch
from holdfast_formats.tensors import TensorSpec
from tests.formats.strategies import NAMES, file_bytes, specs

HF_NAME = re.compile(r"(model|optim)(-\d{5}-of-\d{5})?\.safetensors")


@given(specs(), st.integers(1, 200), st.data())
def test_files_do_not_depend_on_the_order_of_tensors(tensors: list[TensorSpec], limit: int, data: st.DataObject) -> None:
    """Whoever lists the tensors, in whatever order, the same files come out."""
    assert packing.pack(tensors, limit) == packing.pack(data.draw(st.permutations(tensors)), limit)


@pytest.mark.parametrize(
    ("data_bytes", "length"),
    [
        (0, 2**18),
        (2**31, 2**18),
        (2**34, 2**18),
        (2**34 + 1, 2**19),
        (2**35, 2**19),
        (10**11, 2**21),
        (2**40, 2**24),
        (10**15, 2**24),
    ],
)
def test_the_length_of_extents_follows_from_the_bytes(data_bytes: int, length: int) -> None:
    """A power of two that gives about 65 536 extents, within 256 KiB and the format's 16 MiB."""
    assert packing.extent_bytes(data_bytes) == length


@pytest.mark.parametrize(
    ("tensor_bytes", "length"),
    [(0, 2**18), (2**21, 2**18), (2**21 + 1, 2**19), (3 * 2**20, 2**19), (2**26, 2**23), (2**40, 2**23)],
)
def test_a_small_tensor_has_shorter_extents(tensor_bytes: int, length: int) -> None:
    """An eighth of it at most, where that is no less than 256 KiB."""
    assert packing.tensor_extent_bytes(tensor_bytes, 2**23) == length


@given(specs(), st.integers(1, 200))
def test_every_tensor_has_one_place(tensors: list[TensorSpec], limit: int) -> None:
    """Each tensor is in one file of its group, where the file's own header says, and files hold nothing else."""
    plans = packing.pack(tensors, limit)
    placed = [spec for plan in plans for spec, _ in plan.tensors]
    assert sorted(placed, key=lambda s: (s.group, s.name)) == sorted(tensors, key=lambda s: (s.group, s.name))
    for plan in plans:
        file = file_bytes(plan)
        header = safetensors.decode(file, len(file), plan.name)
        found = [(t.name, t.dtype, t.shape, t.start + header.header_bytes) for t in header.tensors]
        assert found == [(s.name, s.dtype, s.shape, start) for s, start in plan.tensors]
        assert {spec.group for spec, _ in plan.tensors} == {plan.group}
        assert header.metadata == {"format": "pt"}
        assert plan.bytes == len(file)


@given(specs(), st.integers(1, 200))
def test_no_file_is_over_the_limit_unless_one_tensor_is(tensors: list[TensorSpec], limit: int) -> None:
    """Data over the limit means a single tensor with bytes; and no two neighbours would have fitted into one file."""
    plans = packing.pack(tensors, limit)
    sizes = [plan.bytes - len(plan.header) for plan in plans]
    for plan, size in zip(plans, sizes, strict=True):
        assert size <= limit or len([spec for spec, _ in plan.tensors if spec.nbytes]) == 1
    for before, after, size in zip(plans, plans[1:], sizes, strict=False):
        first = min((s for s, _ in after.tensors), key=lambda s: packing.natural_key(s.name))
        assert before.group != after.group or size + first.nbytes > limit


@given(specs(), st.integers(1, 200))
def test_names_are_hugging_faces(tensors: list[TensorSpec], limit: int) -> None:
    """One file is `group.safetensors`, several are numbered from one and state how many there are."""
    plans = packing.pack(tensors, limit)
    assert len({plan.name for plan in plans}) == len(plans)
    for group in {spec.group for spec in tensors}:
        names = [plan.name for plan in plans if plan.group == group]
        assert all(HF_NAME.fullmatch(name) for name in names)
        assert (names == [f"{group}.safetensors"]) == (len(names) == 1)
        assert len(names) == 1 or names == [
            f"{group}-{i + 1:05d}-of-{len(names):05d}.safetensors" for i in range(len(names))
        ]


def test_layers_are_packed_in_natural_order() -> None:
    """Layer 2 goes into an earlier file than layer 10; inside one file the library's order by dtype and name holds."""
    tensors = [TensorSpec("model", f"layers.{i}.w", "F32", (1,)) for i in (10, 2, 1)]
    names = [plan.tensors[0][0].name for plan in packing.pack(tensors, 4)]
    assert names == ["layers.1.w", "layers.2.w", "layers.10.w"]
    together = [spec.name for spec, _ in packing.pack([*tensors, TensorSpec("model", "z", "I64", ())])[0].tensors]
    assert together == ["z", "layers.1.w", "layers.10.w", "layers.2.w"]


def test_a_file_of_the_limit_exactly_is_one_file() -> None:
    """The limit counts tensor bytes, and reaching it is allowed; a larger tensor stands alone."""
    pair = [TensorSpec("model", name, "U8", (4,)) for name in "ab"]
    assert len(packing.pack(pair, 8)) == 1
    assert len(packing.pack(pair, 7)) == 2
    alone = packing.pack([*pair, TensorSpec("model", "aa", "U8", (100,))], 8)
    assert [[s.name for s, _ in plan.tensors] for plan in alone] == [["a"], ["aa"], ["b"]]


def test_frozen_tensors_have_files_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the others, each in natural order; but few bytes stay where they would be, and so does a group that is
    frozen as a whole.
    """
    monkeypatch.setattr(packing, "FROZEN_BYTES_MIN", 8)
    tensors = [TensorSpec("model", f"l.{i}", "U8", (4,)) for i in range(6)]
    frozen = {("model", f"l.{i}") for i in (0, 2, 4)}

    def named(marked: set[tuple[str, str]], limit: int = 8) -> list[tuple[bool, list[str]]]:
        return [(plan.frozen, [spec.name for spec, _ in plan.tensors]) for plan in packing.pack(tensors, limit, marked)]

    assert named(frozen) == [
        (False, ["l.1", "l.3"]),
        (False, ["l.5"]),
        (True, ["l.0", "l.2"]),
        (True, ["l.4"]),
    ]
    one = {("model", "l.0"), ("ema", "l.2")}
    assert named(one) == [(False, names) for _, names in named(set())]
    assert named({("model", spec.name) for spec in tensors}) == [(True, names) for _, names in named(set())]


@given(specs(), st.integers(1, 200), st.data())
def test_what_is_frozen_changes_no_tensor(tensors: list[TensorSpec], limit: int, data: st.DataObject) -> None:
    """Each is in one file still, whole, and a file is frozen if all its tensors are."""
    frozen = {key for spec in tensors if data.draw(st.booleans()) for key in [(spec.group, spec.name)]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "FROZEN_BYTES_MIN", data.draw(st.integers(1, 100)))
        plans = packing.pack(tensors, limit, frozen)
    held = [(spec.group, spec.name) for plan in plans for spec, _ in plan.tensors]
    assert sorted(held) == sorted((spec.group, spec.name) for spec in tensors)
    for plan in plans:
        assert plan.frozen == all((spec.group, spec.name) in frozen for spec, _ in plan.tensors)


@given(st.lists(NAMES, unique=True))
def test_natural_order_is_total(names: list[str]) -> None:
    """Different names have different keys that compare, also where digits of other scripts stand in them."""
    keys = sorted(packing.natural_key(name) for name in [*names, "a1", "a01", "a", "a\u0663", "a²", "1"])
    assert len(set(keys)) == len({*names, "a1", "a01", "a", "a\u0663", "a²", "1"})


@given(st.lists(NAMES | st.from_regex(r"[a.]{0,2}[0-9٣²]{0,3}[b.][0-9]{0,3}", fullmatch=True), unique=True))
def test_natural_order_never_changes(names: list[str]) -> None:
    """It decides where tensors stand on disk, so however it is worked out, it is the one that was written down first."""

    def first(name: str) -> tuple[tuple[int, int | str], ...]:
        parts = re.split(r"(\d+)", name)
        return (*((1, int(p)) if p.isdigit() and p.isascii() else (0, p) for p in parts), (0, name))

    assert [packing.natural_key(name) for name in names] == [first(name) for name in names]


def test_a_name_twice_is_refused() -> None:
    """Names are unique in a group, and only there; the refusal names both group and tensor."""
    tensor = TensorSpec("model", "w", "F32", (1,))
    assert len(packing.pack([tensor, TensorSpec("ema", "w", "F32", (1,))])) == 2
    for limit in (1, 100):
        with pytest.raises(StateMismatch, match="'model' has two tensors named 'w'"):
            packing.pack([tensor, TensorSpec("model", "w", "BF16", (2,))], limit)


def test_what_no_file_could_hold_is_refused() -> None:
    """A limit below one byte, a group that is no file name and a tensor without a name are refused before packing."""
    with pytest.raises(InvalidRequest, match="file_bytes_max"):
        packing.pack([], 0)
    with pytest.raises(InvalidRequest, match="group name"):
        packing.pack([TensorSpec("../up", "w", "F32", (1,))])
    with pytest.raises(LimitExceeded):
        packing.pack([TensorSpec("model", "", "F32", (1,))])
    assert packing.pack([]) == []


def test_a_packed_file_is_what_the_library_opens(tmp_path: Path) -> None:
    """The plan's header and the tensors' bytes, written one behind the other, are a file for any safetensors reader."""
    for plan in packing.pack([TensorSpec("model", f"l.{i}", "F32", (2, i)) for i in range(4)], 24):
        (tmp_path / plan.name).write_bytes(file_bytes(plan))
        with library.safe_open(tmp_path / plan.name, "np") as opened:
            names = opened.keys()
            shapes = {name: opened.get_slice(name).get_shape() for name in names}
        assert shapes == {spec.name: list(spec.shape) for spec, _ in plan.tensors}
