"""A program and its inverse are the identity on every element, whatever the program; or the reason is named."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.programs import compile_program, inverted, read_program, statements_only
from tests.formats.programs.arrays import Arrays, applied, key, same, specs


class Author:
    """Writes a random program, statement by statement, for tensors whose shapes it follows."""

    def __init__(self, data: st.DataObject) -> None:
        self._data, self.lines, self.made = data, list[str](), 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        for number in range(data.draw(st.integers(1, 4))):
            dimensions = data.draw(st.integers(1, 3))
            shape = tuple(data.draw(st.sampled_from([2, 4, 8])) for _ in range(dimensions))
            self.shapes[f"t{number}"] = shape
        self.start = dict(self.shapes)
        self.padded: dict[str, tuple[int, ...]] = {}

    def write(self) -> None:
        """Add a statement; some fit nothing that is there, and are left out."""
        kind = self._data.draw(st.sampled_from([name for name in dir(Author) if name.startswith("_w_")]))
        if not self.shapes:
            return
        name = self._data.draw(st.sampled_from(sorted(self.shapes)))
        if not self.shapes[name]:
            return
        getattr(self, kind)(name, self.shapes[name])

    def _line(self, left: list[str], right: dict[str, tuple[int, ...]], *attributes: str, turned: str = "") -> None:
        for name in left:
            del self.shapes[name]
        self.shapes |= right
        sources = ", ".join(name + turned for name in left)
        self.lines.append(", ".join([f"{sources} -> {', '.join(right)}", *attributes]))

    def _new(self) -> str:
        self.made += 1
        return f"n{self.made}"

    def _axis(self, shape: tuple[int, ...]) -> int:
        return self._data.draw(st.integers(0, len(shape) - 1))

    def _w_rename(self, name: str, shape: tuple[int, ...]) -> None:
        self._line([name], {self._new(): shape})

    def _w_turn(self, name: str, shape: tuple[int, ...]) -> None:
        self._line([name], {name: shape[::-1]}, turned="^T")

    def _w_permute(self, name: str, shape: tuple[int, ...]) -> None:
        order = self._data.draw(st.permutations(range(len(shape))))
        self._line([name], {self._new(): tuple(shape[d] for d in order)}, f'permute="{list(order)}"')

    def _w_split(self, name: str, shape: tuple[int, ...]) -> None:
        axis = self._axis(shape)
        if shape[axis] < 2:
            return
        first = self._data.draw(st.integers(1, shape[axis] - 1))
        sizes = (first, shape[axis] - first)
        right = {self._new(): (*shape[:axis], size, *shape[axis + 1 :]) for size in sizes}
        said = [f"sizes={list(sizes)}"] if sizes[0] != sizes[1] or self._data.draw(st.booleans()) else []
        self._line([name], right, f"axis={axis}", *said)

    def _w_join(self, name: str, shape: tuple[int, ...]) -> None:
        axis = self._axis(shape)
        held = [n for n, s in self.shapes.items() if s[:axis] + s[axis + 1 :] == shape[:axis] + shape[axis + 1 :]]
        held = [n for n in held if len(self.shapes[n]) == len(shape)]
        sizes = [self.shapes[n][axis] for n in held]
        made = (*shape[:axis], sum(sizes), *shape[axis + 1 :])
        if len(held) > 1:
            self._line(held, {self._new(): made}, f"axis={axis}", f"sizes={sizes}")

    def _w_stack(self, name: str, shape: tuple[int, ...]) -> None:
        held, axis = [n for n, s in self.shapes.items() if s == shape], self._data.draw(st.integers(0, len(shape)))
        if len(held) > 1 and len(shape) < 4:
            self._line(held, {self._new(): (*shape[:axis], len(held), *shape[axis:])}, "stack", f"axis={axis}")

    def _w_unstack(self, name: str, shape: tuple[int, ...]) -> None:
        axis = self._axis(shape)
        if 1 < shape[axis] < 5:
            right = {self._new(): shape[:axis] + shape[axis + 1 :] for _ in range(shape[axis])}
            self._line([name], right, "unstack", f"axis={axis}")

    def _w_gather(self, name: str, shape: tuple[int, ...]) -> None:
        axis = self._axis(shape)
        number = self._new()
        if 0 < shape[axis] < 5:
            inner = shape[:axis] + shape[axis + 1 :]
            self.lines.append(f"{name} -> e{number}.$EXPERT_ID.w, unstack, axis={axis}")
            self.lines.append(f"e{number}.*.w -> {number}, stack, axis=0")
            del self.shapes[name]
            self.shapes[number] = (shape[axis], *inner)

    def _w_ffn(self, name: str, shape: tuple[int, ...]) -> None:
        axis, ranks = self._axis(shape), self._data.draw(st.sampled_from([1, 2]))
        if shape[axis] % (2 * ranks) == 0 and shape[axis]:
            half = (*shape[:axis], shape[axis] // 2, *shape[axis + 1 :])
            self._line([name], {self._new(): half, self._new(): half}, "fused_ffn", f"axis={axis}", f"ranks={ranks}")

    def _w_qkv(self, name: str, shape: tuple[int, ...]) -> None:
        axis = self._axis(shape)
        word = self._data.draw(st.sampled_from(["fused_qkv", "fused_qkv_old"]))
        if shape[axis] and shape[axis] % 8 == 0:
            size = shape[axis] // 8
            parts = {self._new(): (*shape[:axis], n * size, *shape[axis + 1 :]) for n in (4, 2, 2)}
            said = ["ranks=2"] if word == "fused_qkv_old" else []
            self._line([name], parts, word, f"axis={axis}", "num_heads=4", "num_key_value_groups=2", *said)

    def _w_rotary(self, name: str, shape: tuple[int, ...]) -> None:
        axis, order = self._axis(shape), self._data.draw(st.sampled_from(["halves", "interleaved"]))
        if shape[axis] and shape[axis] % 4 == 0:
            self._line([name], {self._new(): shape}, f"rotary={order}", f"axis={axis}", "num_heads=2")

    def _w_pad(self, name: str, shape: tuple[int, ...]) -> None:
        axis = self._axis(shape)
        made = (*shape[:axis], shape[axis] + 3, *shape[axis + 1 :])
        self._line([name], {self._new(): made}, f"axis={axis}", f"size={shape[axis]}", f"pad_to={shape[axis] + 3}")

        made_name = next(reversed(self.shapes))
        if made_name.startswith("n"):
            self.padded[made_name] = self.shapes.pop(made_name)  # what is cut of it later could be nothing but padding

    def _w_ranges(self, name: str, shape: tuple[int, ...]) -> None:
        self._line([name], {f"{name}.{self._new()}.3.w": shape})

    def cast_all(self) -> None:
        """Every tensor is cast, and back is exact."""
        for name, shape in list(self.shapes.items()):
            self._line([name], {self._new(): shape}, 'src_dtype="bfloat16"', 'dst_dtype="float32"')


@given(data=st.data())
def test_a_program_and_its_inverse_change_nothing(data: st.DataObject) -> None:
    """Any program of statements that have inverses, then its inverse: all is as it was, and so is what follows it."""
    author = Author(data)
    if data.draw(st.booleans()):
        author.cast_all()
    for _ in range(data.draw(st.integers(1, 8))):
        author.write()
    program = statements_only("\n".join(author.lines))
    start: Arrays = {}
    for name, shape in author.start.items():
        values = np.random.default_rng(len(start)).integers(1, 200, shape)
        start[key(name)] = values.astype(_bfloat16())
        start[key(f"{name}/exp_avg", "optim")] = (values * 3).astype("<f4")
        start[key(name, "master")] = (values * 5).astype("<f4")
    compiled = compile_program(program, specs(start), {})
    made = applied(compiled, start)
    assert not compiled.lost
    for each, values in made.items():
        assert values.shape == (author.shapes | author.padded)[each.name.split("/")[0]]
    back = compile_program(inverted(program), specs(made), {})
    same(applied(back, made), start)
    assert sum(prod(values.shape) for values in made.values()) >= sum(prod(values.shape) for values in start.values())


def _bfloat16() -> Any:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("a -> b, slice=[0:2]", "slice"),
        ("a -> _", "dropped is lost"),
        ("a, b -> c", "the length of each part"),
        ("a.*.w -> c, sizes=equal", "the number of parts"),
        ("a -> b, dtype=float32", "dtype before the cast"),
        ("a -> b, src_dtype=float32, dst_dtype=bfloat16", "loses digits"),
        (r"/a\.(.*)/ -> /b.\1/", "expression has no inverse"),
        ("a -> b, pad_to=8", "the size before"),
        ("a -> b\na -> c", "'a' is used a second time"),
        ("a -> a\na -> c", "'a' is used a second time"),
    ],
)
def test_what_prevents_an_inverse_is_named(statement: str, why: str) -> None:
    """The error has the statement, and says what is not known."""
    with pytest.raises(InvalidRequest, match=f"no inverse: line {statement.count(chr(10)) + 1}, .*{why}"):
        inverted(statements_only(statement))


def test_an_inverse_by_hand_goes_before() -> None:
    """`[inverse]` is used as it is written, and its own inverse is the program."""
    program = read_program(
        'name = "x"\nfrom = "p"\nto = "q"\nstatements = "a -> b, slice=[0:2]"\n[inverse]\nstatements = "b -> a, pad_to=4"\n'
    )
    back = inverted(program)
    assert (back.source, back.target) == ("q", "p")
    assert [one.text for one in back.statements] == ["b -> a, pad_to=4"]
    assert inverted(back).statements == program.statements


def test_equal_tensors_come_back_as_copies() -> None:
    """`same` keeps one of several equal tensors, and gives all of them back."""
    program = statements_only("embed, head -> tok, same")
    start: Arrays = {
        key("embed"): np.arange(6, dtype="<f4").reshape(2, 3),
        key("head"): np.arange(6, dtype="<f4").reshape(2, 3),
    }
    compiled = compile_program(program, specs(start), {})
    assert compiled.equal == ((key("embed"), key("head")),)
    made = applied(compiled, start)
    assert list(made) == [key("tok")]
    same(applied(compile_program(inverted(program), specs(made), {}), made), start)


def test_layers_are_moved_back_by_one() -> None:
    """A name with an offset finds its number again in the inverse."""
    program = statements_only("layers.$LAYER_ID_OFFSET.w -> model.layers.$LAYER_ID_OFFSET.v")
    start: Arrays = {key(f"layers.{n}.w"): np.full((2,), n, "<f4") for n in (1, 2, 3)}
    made = applied(compile_program(program, specs(start), {}), start)
    assert {each.name: values[0] for each, values in made.items()} == {f"model.layers.{n - 1}.v": n for n in (1, 2, 3)}
    same(applied(compile_program(inverted(program), specs(made), {}), made), start)
