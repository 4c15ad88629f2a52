"""AOA statements of Paddle's models, as a program that goes both ways."""

from __future__ import annotations

import re

import pytest

from holdfast.integrations.paddle.aoa import HINT, LiveTensor, made_program
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.mapping.listing import TensorKey
from holdfast_formats.programs import compile_program
from holdfast_formats.programs.inverse_names import shapes_back, way_back
from holdfast_formats.tensors import TensorSpec

Shapes = dict[str, tuple[int, ...]]

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
L = "model.layers.$LAYER_ID."
FUSED = [
    f"{EMBED} -> {EMBED}",
    f"{L}a.q.weight^T, {L}a.k.weight^T, {L}a.v.weight^T -> {L}a.qkv.weight, fused_qkv, num_heads=4, num_key_value_groups=2",
    f"{L}m.gate.weight^T, {L}m.up.weight^T -> {L}m.up_gate.weight, fused_ffn",
    f"{L}m.router.weight -> {L}m.router.weight, dtype='float32'",
    f"{L}q_norm.weight -> {L}q_norm.weight",
]


def live(shapes: Shapes, **more: int | bool) -> dict[str, LiveTensor]:
    return {name: LiveTensor(shape, **more) for name, shape in shapes.items()}  # type: ignore[arg-type]


def stored(texts: list[str], tensors: dict[str, LiveTensor]) -> Shapes:
    """The shapes of the stored tensors, of which the program makes the live ones again."""
    program = made_program("paddle-model", texts, tensors)
    found = shapes_back(way_back(program), {name: one.shape for name, one in tensors.items()}, {})
    specs = {TensorKey("model", name): TensorSpec("model", name, "F32", shape) for name, shape in found.items()}
    made = compile_program(program, specs, {})
    assert {key.name: one.spec.shape for key, one in made.tensors.items()} == {n: one.shape for n, one in tensors.items()}
    assert not made.casts and not made.lost
    return found


def test_fused_tensors_are_stored_as_their_parts():
    """Each in [out, in]; what no statement makes keeps its name, and a cast does nothing."""
    layer = "model.layers.0."
    shapes: Shapes = {
        EMBED: (10, 8),
        f"{layer}a.qkv.weight": (8, 16),
        f"{layer}m.up_gate.weight": (8, 12),
        f"{layer}m.router.weight": (8, 3),
        "score": (2,),
    }
    assert stored(FUSED, live(shapes)) == {
        EMBED: (10, 8),
        f"{layer}a.q.weight": (8, 8),
        f"{layer}a.k.weight": (4, 8),
        f"{layer}a.v.weight": (4, 8),
        f"{layer}m.gate.weight": (6, 8),
        f"{layer}m.up.weight": (6, 8),
        f"{layer}m.router.weight": (8, 3),
        "score": (2,),
    }


def test_a_fusion_by_rank_has_the_ranks_of_the_live_tensor():
    """Each of two ranks holds its part of gate, then its part of up."""
    tensors = {"m.up_gate.weight": LiveTensor((8, 6), ranks=2)}
    program = made_program("m", ["m.gate.weight^T, m.up.weight^T -> m.up_gate.weight, fused_ffn"], tensors)
    keys = ["m.gate.weight", "m.up.weight"]
    specs = {TensorKey("model", name): TensorSpec("model", name, "F32", (6, 8)) for name in keys}
    moves = compile_program(program, specs, {}).tensors[TensorKey("model", "m.up_gate.weight")].moves
    columns = sorted((move.target.offset[1], move.source.name, move.box.offset[0]) for move in moves)
    assert columns == [(0, keys[0], 0), (3, keys[1], 0), (6, keys[0], 3), (9, keys[1], 3)]


def test_fusions_by_different_ranks_are_refused():
    """One statement, whose tensors are cut in two ways."""
    tensors = {f"layers.{n}.w": LiveTensor((8, 6), ranks=n + 1) for n in range(2)}
    with pytest.raises(InvalidRequest, match="cut over 1 and 2 ranks") as refused:
        made_program("m", ["layers.$LAYER_ID.g^T, layers.$LAYER_ID.u^T -> layers.$LAYER_ID.w, fused_ffn"], tensors)
    assert refused.value.hint == HINT


@pytest.mark.parametrize("head", [HEAD, f"model.{HEAD}"])
def test_a_head_that_is_tied_to_the_embeddings_has_the_name_of_checkpoints(head):
    """Paddle's statements use the embeddings twice; a checkpoint may have it under both names."""
    texts = [f"{EMBED} -> model.embedding.weight", f"{EMBED} -> {head}"]
    assert stored(texts, live({"model.embedding.weight": (10, 8), head: (10, 8)})) == {EMBED: (10, 8), HEAD: (10, 8)}


def test_a_tensor_that_is_used_twice_is_stored_once():
    """Both live tensors must be equal."""
    texts = ["a.weight -> x.weight", "a.weight -> y.weight", "a.weight -> not_live.weight"]
    program = made_program("m", texts, live({"x.weight": (2,), "y.weight": (2,)}))
    found = shapes_back(way_back(program), {"x.weight": (2,), "y.weight": (2,)}, {})
    assert found == {"a.weight": (2,)}


def test_experts_that_are_joined_are_equal_parts():
    """Paddle's inverse takes them to be; two statements lead to one live tensor."""
    experts = [f"e.{n}.w1" for n in range(3)]
    texts = [f"h.{n}.gate^T, h.{n}.up^T -> {one}, axis=1" for n, one in enumerate(experts)]
    texts.append(f"{','.join(experts)} -> all, axis=0")
    expected = {f"h.{n}.{part}": (5, 4) for n in range(3) for part in ("gate", "up")}
    assert stored(texts, live({"all": (12, 10)})) == expected


def test_a_linear_weight_is_transposed_without_a_statement():
    """Others stay."""
    tensors = live({"norm.weight": (4,), "embed.weight": (9, 4)})
    assert stored([], tensors) == {"norm.weight": (4,), "embed.weight": (9, 4)}
    assert stored([], {**tensors, "fc.weight": LiveTensor((4, 6), turned=True)})["fc.weight"] == (6, 4)


def test_a_tensor_that_paddle_fills_itself_is_stored_as_it_is():
    """`_ -> name` makes it of nothing; and what Paddle drops, a checkpoint may lack."""
    assert stored(["_ -> fresh", "unused -> _", "a^T -> w"], live({"fresh": (3,), "w": (2, 5)})) == {
        "fresh": (3,),
        "a": (5, 2),
    }


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a -> b, conjugate=1", "there is no attribute 'conjugate'"),
        ("a -> b, slice=[0:2]", "the elements outside a slice are lost"),
        ("e.$EXPERT_ID.w -> b, axis=0", "the length of each part is missing"),
    ],
)
def test_a_statement_that_cannot_be_used_is_refused(text, told):
    """With its text, or its line and column, and the option."""
    with pytest.raises(InvalidRequest, match=told) as refused:
        made_program("m", [text], live({"b": (4,)}))
    assert re.match("program 'm'", refused.value.detail) and refused.value.hint == HINT
