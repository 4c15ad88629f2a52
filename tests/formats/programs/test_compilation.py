"""What a program makes of a checkpoint: all is used once or named, and what belongs to a parameter follows it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from holdfast_formats.errors import InvalidRequest, LimitExceeded, StateMismatch
from holdfast_formats.mapping.listing import TensorKey
from holdfast_formats.programs import Ranks, compile_program, environment, matching, read_program, statements_only
from holdfast_formats.programs.compiled import CompiledProgram
from holdfast_formats.programs.following import lossless
from holdfast_formats.programs.operations import dtype_named
from holdfast_formats.tensors import TensorSpec
from tests.formats.programs.arrays import Arrays, applied, key, specs

STRICT = 'name = "test"\nfrom = "a"\nto = "b"\nstatements = """\n{}\n"""\n[sizes]\nheads = "num_attention_heads"\n'


def _numbers(*shape: int, start: int = 0, dtype: str = "<f4") -> Any:
    return np.arange(start, start + int(np.prod(shape)), dtype=dtype).reshape(shape)


def _compiled(statements: str, start: Arrays, config: dict[str, Any] | None = None) -> CompiledProgram:
    return compile_program(read_program(STRICT.format(statements)), specs(start), config or {})


def test_what_belongs_to_a_parameter_follows_it() -> None:
    """Masters, averages and moments are fused as weights are, a count is taken once, and the others must be equal to it."""
    start: Arrays = {}
    for name in ("gate", "up"):
        start[key(name)] = _numbers(2, 3, start=len(start))
        start[key(name, "master")] = _numbers(2, 3, start=100 + len(start))
        start[key(name, "ema")] = _numbers(2, 3, start=200 + len(start))
        start[key(f"{name}/exp_avg", "optim")] = _numbers(2, 3, start=300 + len(start))
        start[key(f"{name}/step", "optim")] = np.float32(5).reshape(())
    compiled = _compiled("gate^T, up^T -> fc1, axis=1", start)
    made = applied(compiled, start)
    for group, end in (("model", ""), ("master", ""), ("ema", ""), ("optim", "/exp_avg")):
        wanted = np.concatenate([start[key(name + end, group)].T for name in ("gate", "up")], axis=1)
        np.testing.assert_array_equal(made[key(f"fc1{end}", group)], wanted)
    assert made[key("fc1/step", "optim")] == 5
    assert compiled.equal == ((key("gate/step", "optim"), key("up/step", "optim")),)
    assert compiled.names == {"gate": ("fc1",), "up": ("fc1",)}
    assert len(made) == 5


def test_a_split_parameters_count_goes_to_all() -> None:
    """Both halves have the steps of the whole."""
    start: Arrays = {key("fc1"): _numbers(4, 3), key("fc1/step", "optim"): np.float32(5).reshape(())}
    made = applied(_compiled("fc1 -> gate, up", start), start)
    assert made[key("gate/step", "optim")] == made[key("up/step", "optim")] == 5


def test_state_of_another_shape_follows_a_new_name_only() -> None:
    """Factored state keeps its elements under a new name, and is refused by name where its parameter changes."""
    start: Arrays = {key("w"): _numbers(4, 3), key("w/exp_avg_sq_row", "optim"): _numbers(4)}
    made = applied(_compiled("w -> v", start), start)
    np.testing.assert_array_equal(made[key("v/exp_avg_sq_row", "optim")], _numbers(4))
    with pytest.raises(StateMismatch, match=r"'w/exp_avg_sq_row' of group optim has shape \[4\]"):
        _compiled("w^T -> v", start)


def test_a_part_that_lacks_its_master_is_named() -> None:
    """Tensors that are fused have masters all, or none of them has."""
    start: Arrays = {key("a"): _numbers(2, 2), key("b"): _numbers(2, 2), key("a", "master"): _numbers(2, 2)}
    with pytest.raises(StateMismatch, match="'b', which is not in group master"):
        _compiled("a, b -> c", start)


def test_other_groups_stay_as_they_are() -> None:
    """Tensors that belong to no parameter are not mapped."""
    start: Arrays = {key("w"): _numbers(2), key("rng", "extra"): _numbers(3, dtype="u1")}
    made = applied(_compiled("w -> v", start), start)
    np.testing.assert_array_equal(made[key("rng", "extra")], _numbers(3, dtype="u1"))


def test_all_that_is_there_must_be_said() -> None:
    """A tensor in no statement is refused by name, dropped by name, or passes by `* -> *`."""
    start: Arrays = {key("w"): _numbers(2), key("other"): _numbers(3), key("other", "master"): _numbers(3)}
    with pytest.raises(StateMismatch, match="1 tensors are in no statement: 'other'") as caught:
        _compiled("w -> v", start)
    assert "* -> *" in caught.value.hint
    dropped = _compiled("w -> v\nother -> _", start)
    assert {(lost.key, lost.elements) for lost in dropped.lost} == {(key("other"), 3), (key("other", "master"), 3)}
    assert "line 2" in dropped.lost[0].why
    assert set(_compiled("w -> v\n* -> *", start).tensors) == {key("v"), key("other"), key("other", "master")}


def test_a_slice_names_what_it_loses() -> None:
    """Elements that a slice leaves away are counted, for each tensor of the parameter."""
    start: Arrays = {key("w"): _numbers(4, 3), key("w", "master"): _numbers(4, 3)}
    compiled = _compiled("w -> v, slice=[1:3]", start)
    np.testing.assert_array_equal(applied(compiled, start)[key("v")], _numbers(4, 3)[1:3])
    assert [(lost.key.group, lost.elements) for lost in compiled.lost] == [("model", 6), ("master", 6)]


def test_zeros_are_added_and_checked() -> None:
    """A new tensor is zeros in the weights and masters; one that is dropped as zeros is to be checked."""
    start: Arrays = {key("w"): _numbers(2), key("w", "master"): _numbers(2), key("b"): np.zeros(2, "<f4")}
    compiled = _compiled(
        '* -> *\n_ -> bias, shape=[{heads}], dtype="bfloat16"\nb -> _, zeros', start, {"num_attention_heads": 3}
    )
    made = applied(compiled, start)
    assert compiled.added == (key("bias"), key("bias", "master"))
    assert made[key("bias")].shape == (3,) and str(made[key("bias")].dtype) == "bfloat16"
    assert made[key("bias", "master")].dtype == np.float32
    assert compiled.zeros == (key("b"),)


def test_casts_change_weights_and_are_named() -> None:
    """Weights are rounded, masters keep their digits; the cast says whether it is lossless."""
    start: Arrays = {key("w"): _numbers(2), key("w", "master"): _numbers(2)}
    compiled = _compiled("w -> w, dtype=bfloat16", start)
    assert [(cast.before, cast.after, cast.lossless) for cast in compiled.casts] == [("F32", "BF16", False)]
    assert compiled.tensors[key("w", "master")].spec.dtype == "F32"
    assert _compiled("w -> w, dtype=float64", start).casts[0].lossless
    with pytest.raises(StateMismatch, match="cannot be cast from F32 to I32"):
        _compiled("w -> w, dtype=int32", start)
    with pytest.raises(StateMismatch, match="'w' is F32, not BF16"):
        _compiled("w -> w, src_dtype=bfloat16, dst_dtype=float32", start)


def test_tensors_of_several_dtypes_are_not_fused() -> None:
    """Both are named, and dtype= casts them."""
    start: Arrays = {key("a"): _numbers(2), key("b"): _numbers(2, dtype="<f2")}
    with pytest.raises(StateMismatch, match="'a' is F32, 'b' is F16"):
        _compiled("a, b -> c", start)
    assert _compiled("a, b -> c, dtype=float32", start).casts == ((key("c"), "F16", "F32", True),)


@pytest.mark.parametrize(
    ("statements", "error", "what"),
    [
        ("x -> y\n* -> *", StateMismatch, "no tensor has the name 'x'"),
        ("a -> z\nb -> z", StateMismatch, "'z' already exists"),
        ("a -> b", StateMismatch, "'b' already exists"),
        ("a, b -> c", StateMismatch, "cannot be joined"),
        ("b -> c, d, axis=1\na -> _", StateMismatch, "3 in dimension 1 cannot be split into 2"),
        ("b -> c, d, sizes=[1, 2]\na -> _", StateMismatch, "has 2 in dimension 0, not 1 times 1\\+2"),
        ("a -> c, axis=3, d\nb -> _", InvalidRequest, "no attribute 'd'"),
        ("a -> c, d, axis=3\nb -> _", StateMismatch, "there is no dimension 3"),
        ("e.$LAYER_ID.q, e.$LAYER_ID.k -> f.$LAYER_ID\n* -> *", StateMismatch, "'e.2.k' is missing"),
        ("g.*.w -> f\n* -> *", StateMismatch, "'g.1.w' is missing; the next is 'g.2.w'"),
        ("b -> c, permute=[0,0]\na -> _", StateMismatch, "does not order"),
        ("b -> c, fused_qkv, num_heads=4\n* -> *", InvalidRequest, "become one tensor, or one becomes"),
        ("b -> c, d, fused_ffn, ranks=2, axis=0\n* -> *", StateMismatch, "are not gate and up of 2 ranks"),
        ("b -> c.$EXPERT_ID\na -> _", InvalidRequest, "the number of resulting tensors is unknown"),
        ("b -> c, slice=[0:9]\n* -> *", StateMismatch, "not 0:9"),
        ("b -> c, pad_to=1\n* -> *", StateMismatch, "more than pad_to=1"),
        ("b -> c, pad_to={heads}\n* -> *", InvalidRequest, "the size 'heads' is unknown"),
        ("_ -> c\n* -> *", InvalidRequest, "shape= is missing"),
        ("a -> __metadata__\n* -> *", InvalidRequest, "reserves that name"),
        ("a -> " + "n" * 1025 + "\n* -> *", LimitExceeded, "must have 1 to 1024 bytes"),
        ("a -> c, dtype=floaty\n* -> *", InvalidRequest, "there is no dtype 'floaty'"),
        ("b -> c, rotary=halves, num_heads=3\n* -> *", StateMismatch, "not 3 heads of pairs"),
        ("e.$LAYER_ID_OFFSET.q -> h.$LAYER_ID_OFFSET\n* -> *", StateMismatch, "has no name for -1"),
    ],
)
def test_what_does_not_fit_is_refused(statements: str, error: type[Exception], what: str) -> None:
    """By statement and tensor, before anything is made."""
    start: Arrays = {key("a"): _numbers(2), key("b"): _numbers(2, 3), key("g.0.w"): _numbers(1), key("g.2.w"): _numbers(1)}
    start |= {key(f"e.{layer}.{part}"): _numbers(2) for layer in (0, 1, 2) for part in "qk" if (layer, part) != (2, "k")}
    with pytest.raises(error, match=what):
        _compiled(statements, start)


def test_targets_are_what_must_come_out() -> None:
    """With the target's tensors given, another name, shape or dtype is refused."""
    start: Arrays = {key("a"): _numbers(2, 3)}
    program = statements_only("a^T -> b")

    def wanted(name: str, dtype: str, *shape: int) -> dict[TensorKey, TensorSpec]:
        return {key(name): TensorSpec("model", name, dtype, shape)}

    assert set(compile_program(program, specs(start), {}, targets=wanted("b", "F32", 3, 2)).tensors) == {key("b")}
    for targets, what in (
        (wanted("c", "F32", 3, 2), "'c' would not be made"),
        (wanted("b", "F32", 2, 3), r"shape \[3, 2\], not \[2, 3\]"),
        (wanted("b", "BF16", 3, 2), "dtype F32, not BF16"),
        (wanted("b", "F32", 3, 2) | wanted("d", "F32", 1), "'d' would not be made"),
    ):
        with pytest.raises(StateMismatch, match=what):
            compile_program(program, specs(start), {}, targets=targets)


def test_a_tensor_may_be_used_twice() -> None:
    """As AOA has it: `a -> a` keeps a tensor that another statement copies; a note says so."""
    start: Arrays = {key("embed"): _numbers(2, 3)}
    compiled = _compiled("embed -> embed\nembed -> head", start)
    made = applied(compiled, start)
    assert made.keys() == {key("embed"), key("head")}
    assert "'embed' is used more than once" in compiled.notes


def test_ranks_decide_how_gate_and_up_lie() -> None:
    """Of two ranks, each has its gate beside its up; from two ranks to one they are laid out anew."""
    start: Arrays = {key("g"): _numbers(3, 4), key("u"): _numbers(3, 4, start=50)}
    fused = statements_only("g, u -> gu, fused_ffn")
    made = applied(compile_program(fused, specs(start), {}, ranks=Ranks(1, 2)), start)
    g, u = start[key("g")], start[key("u")]
    np.testing.assert_array_equal(made[key("gu")], np.concatenate([g[:, :2], u[:, :2], g[:, 2:], u[:, 2:]], axis=1))
    laid = statements_only("gu -> gu, fused_ffn")
    again = applied(compile_program(laid, specs(made), {}, ranks=Ranks({"gu": 2}, 1)), made)
    np.testing.assert_array_equal(again[key("gu")], np.concatenate([g, u], axis=1))


def test_query_key_and_value_by_rank() -> None:
    """`fused_qkv_old` has each rank's query, key and value one after the other."""
    start: Arrays = {key("q"): _numbers(1, 8), key("k"): _numbers(1, 4, start=20), key("v"): _numbers(1, 4, start=40)}
    program = statements_only("q, k, v -> qkv, fused_qkv_old, num_heads=4, num_key_value_groups=2, ranks=2")
    made = applied(compile_program(program, specs(start), {}), start)
    wanted = [[0, 1, 2, 3, 20, 21, 40, 41, 4, 5, 6, 7, 22, 23, 42, 43]]
    np.testing.assert_array_equal(made[key("qkv")], np.array(wanted, "<f4"))


def test_expressions_rename() -> None:
    """Groups of an expression are used on the right; what it does not match needs another statement."""
    start: Arrays = {key("model.layers.0.a.weight"): _numbers(2), key("model.norm"): _numbers(1)}
    made = applied(_compiled(r"/model\\.layers\\.(\\d+)\\.(.*)/ -> /blk.\\1.\\2/" + "\nmodel.norm -> norm", start), start)
    assert made.keys() == {key("blk.0.a.weight"), key("norm")}
    with pytest.raises(InvalidRequest, match="invalid group reference"):
        _compiled(r"/model\\.(.*)/ -> /blk.\\3/", start)


def test_a_name_that_is_too_long_for_an_expression_is_refused() -> None:
    """Not matched for ever."""
    start: Arrays = {key("a" * 1025): _numbers(1)}
    with pytest.raises(LimitExceeded):
        _compiled("/a*/ -> b", start)


def test_rows_say_what_becomes_of_what() -> None:
    """The table of `--dry-run`."""
    start: Arrays = {key(name): _numbers(2, 4) for name in "abcdef"}
    compiled = _compiled("a -> a\nb -> x\nc^T -> y\nd, e -> z\nf -> u, v\n_ -> n, shape=[1], dtype=float32", start)
    assert {row.made.name: row.how for row in compiled.rows(specs(start))} == {
        "a": "kept",
        "x": "renamed",
        "y": "transposed",
        "z": "joined",
        "u": "rearranged",
        "v": "rearranged",
        "n": "added",
    }


@pytest.mark.parametrize(
    ("before", "after", "exact"),
    [
        ("BF16", "F32", True),
        ("F32", "BF16", False),
        ("F16", "BF16", False),
        ("BF16", "F16", False),
        ("F8_E4M3", "BF16", True),
    ],
)
def test_a_cast_is_lossless_if_every_value_has_its_own(before: str, after: str, exact: bool) -> None:
    """By digits and range of the two types."""
    assert lossless(before, after) is exact


def test_dtypes_are_named_as_people_name_them() -> None:
    """By torch, Paddle and safetensors."""
    assert {dtype_named(name, "x") for name in ("torch.bfloat16", "bfloat16", "paddle.bfloat16", "BF16")} == {"BF16"}


def test_a_program_has_a_limit_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that multiplies its work ends with an error."""
    assert matching.STEPS_MAX == environment.STEPS_MAX
    monkeypatch.setattr(environment, "STEPS_MAX", 3)
    start: Arrays = {key(f"l.{layer}.w"): _numbers(1) for layer in range(4)}
    with pytest.raises(LimitExceeded, match="more than 3 steps"):
        _compiled("l.$LAYER_ID.w -> m.$LAYER_ID.w", start)


def test_a_variable_on_the_left_joins() -> None:
    """All its tensors become one, in the order of their numbers; tensors without elements are split like others."""
    start: Arrays = {key(f"e.{number}"): _numbers(1, start=number) for number in (10, 9, 11)} | {key("z"): _numbers(0, 3)}
    made = applied(_compiled("e.$EXPERT_ID -> all\nz -> x, y", start), start)
    assert made[key("all")].tolist() == [9, 10, 11]
    assert made[key("x")].shape == made[key("y")].shape == (0, 3)


@pytest.mark.parametrize(
    ("statements", "shapes"),
    [
        ("a, b -> c, fused_ffn, ranks=1000000000, axis=0", {"a": (0, 4), "b": (0, 4)}),
        ("a -> b, c, fused_ffn, ranks=1000000000, axis=0", {"a": (0, 4)}),
        ("a -> b, rotary=interleaved, num_heads=500000000", {"a": (10**9, 0)}),
        (
            'a -> _\n_ -> z, shape=[1099511627776], dtype="float32"\nz -> b, c, fused_ffn, ranks=549755813888, axis=0',
            {"a": (1,)},
        ),
        pytest.param(  # ten seconds: as many pieces as can be made are made, by doubling
            "\n".join(f"a{i} -> b{i}, c{i}, same\nb{i}, c{i} -> a{i + 1}" for i in range(20)),
            {"a0": (2,)},
            marks=pytest.mark.e2e,
        ),
    ],
)
def test_more_pieces_than_can_be_made_are_refused_before_they_are(
    statements: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    """A number in a statement, or an empty tensor with a long side, costs neither minutes nor memory."""
    held = {key(name): TensorSpec("model", name, "F32", shape) for name, shape in shapes.items()}
    with pytest.raises(StateMismatch, match="pieces"):
        compile_program(read_program(STRICT.format(statements.replace('"', "'"))), held, {})


def test_cutting_what_is_made_of_many_pieces_is_refused() -> None:
    """Every cut looks at every piece."""
    held = {key("a"): TensorSpec("model", "a", "F32", (2**17,)), key("b"): TensorSpec("model", "b", "F32", (2**17,))}
    text = "a, b -> c, fused_ffn, ranks=65536, axis=0\nc -> d, e, fused_ffn, ranks=32768, axis=0"
    with pytest.raises(StateMismatch, match="would be split"):
        compile_program(read_program(STRICT.format(text)), held, {})


def test_tensors_of_values_that_modules_keep_are_no_parameters() -> None:
    """A program without `* -> *` need not name them; they stay as they are."""
    start: Arrays = {key("a"): _numbers(2), key("ranks/00000/a._extra_state/amax"): _numbers(3)}
    assert _compiled("a -> b", start).tensors.keys() == {key("b"), key("ranks/00000/a._extra_state/amax")}
