"""The stored tensors behind a trainer's names: followed by names alone, for ranks that have parts of some tensors."""

from __future__ import annotations

import pytest

from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.programs import load, read_program
from holdfast_formats.programs.document import Program
from holdfast_formats.programs.inverse_names import Counts, StoredName, shapes_back, stored_names, way_back

NONE = Counts({}, frozenset())


def program(statements: str, inverse: str = "") -> Program:
    more = f"[inverse]\nstatements = '''\n{inverse}\n'''\n" if inverse else ""
    return read_program(f"name = 'mine'\nfrom = 'a'\nto = 'b'\nstatements = '''\n{statements}\n'''\n{more}")


def found(
    statements: str, live: dict[str, tuple[int, ...]], counts: Counts = NONE, inverse: str = ""
) -> dict[str, StoredName]:
    return stored_names(way_back(program(statements, inverse)), live, {}, counts)


def test_each_stored_tensor_knows_what_is_made_of_it() -> None:
    """Fused, split, renamed and passing names; shapes where one tensor's shows them."""
    statements = "a, b -> ab, sizes=equal\nc -> d, e, sizes=[1,1]\nx.$LAYER_ID.w -> y.$LAYER_ID\n* -> *"
    live = {"ab": (4,), "d": (1,), "e": (1,), "y.3": (5, 2), "other": (7,)}
    assert found(statements, live) == {
        "a": StoredName(("ab",), None),
        "b": StoredName(("ab",), None),
        "c": StoredName(("d", "e"), None),
        "x.3.w": StoredName(("y.3",), (5, 2)),
        "other": StoredName(("other",), (7,)),
    }


def test_a_rank_may_lack_what_a_statement_joins() -> None:
    """Half of what is split, and the later half of a stack, are enough to know the name."""
    assert set(found("c -> d, e, sizes=[1,1]", {"e": (1,)})) == {"c"}
    assert set(found("all -> e.$EXPERT_ID, unstack", {"e.2": (1,), "e.3": (1,)})) == {"all"}
    assert found("a -> b, c, same", {"c": (2,)}) == {"a": StoredName(("c",), (2,))}


def test_the_length_of_a_stack() -> None:
    """Its own length, unless ranks share it: then the model's; without either the statement is named."""
    statements, live = "e.$EXPERT_ID -> all, stack", {"all": (2, 5)}
    assert found(statements, live) == {f"e.{i}": StoredName(("all",), (5,)) for i in range(2)}
    shared = frozenset({"EXPERT_ID"})
    assert set(found(statements, live, Counts({"EXPERT_ID": 4}, shared))) == {f"e.{i}" for i in range(4)}
    with pytest.raises(InvalidRequest, match="the number of resulting tensors is unknown"):
        found(statements, live, Counts({}, shared))
    assert set(found("e.$EXPERT_ID -> all, axis=0, sizes=equal, count=3", {"all": (6,)})) == {f"e.{i}" for i in range(3)}


def test_a_way_back_by_hand() -> None:
    """Expressions lead back by it, and what nothing takes is named."""
    statements, inverse = "/x(.*)/ -> /y\\1/", "/y(.*)/ -> /x\\1/"
    assert found(statements, {"y1": (2,)}, inverse=inverse) == {"x1": StoredName(("y1",), (2,))}
    with pytest.raises(InvalidRequest, match="no statement defines what 'z' is in the checkpoint"):
        found(statements, {"z": (2,)}, inverse=inverse)
    with pytest.raises(InvalidRequest, match="an expression has no inverse"):
        way_back(program(statements))


def test_drops() -> None:
    """A checkpoint that lacks what is optional is what is saved; one that must have it cannot be."""
    assert len(way_back(program("gone -> _, optional\na -> b"))) == 1
    with pytest.raises(InvalidRequest, match=r"drops what a checkpoint must have: line 1, `gone -> _, zeros`"):
        way_back(program("gone -> _, zeros\na -> b"))


def test_shapes_of_whole_tensors() -> None:
    """The way back as it is run over tensors, of which any may be missing."""
    back = way_back(load("hf-megatron"))
    sizes = {"heads": 4, "kv_heads": 2, "vocab": 30, "padded_vocab": 32}
    at = "decoder.layers.3.self_attention.linear_qkv.weight"
    assert shapes_back(back, {at: (32, 16), "output_layer.weight": (32, 16)}, sizes) == {
        "model.layers.3.self_attn.q_proj.weight": (16, 16),
        "model.layers.3.self_attn.k_proj.weight": (8, 16),
        "model.layers.3.self_attn.v_proj.weight": (8, 16),
        "lm_head.weight": (30, 16),
    }
    with pytest.raises(StateMismatch, match="32 in dimension 0 are not 5 heads"):
        shapes_back(back, {at: (32, 16)}, {**sizes, "heads": 5, "kv_heads": 5})
