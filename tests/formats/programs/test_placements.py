"""A placement says how a program divided the tensor, and with another program of the same systems that counts."""

from __future__ import annotations

import pytest

from holdfast_formats.disk.manifests import TensorEntry
from holdfast_formats.errors import StateMismatch
from holdfast_formats.programs import Program, placements, read_program
from holdfast_formats.programs.compilation import arranged
from holdfast_formats.programs.operations import Ranks
from holdfast_formats.region import Shape

Shapes = dict[str, Shape]


def program(name: str, statements: str = "* -> *", target: str = "ours") -> Program:
    return read_program(f"name = '{name}'\nfrom = 'hf'\nto = '{target}'\nstatements = '''\n{statements}\n'''")


def uses(through: Program, stored: Shapes) -> dict[str, list[placements.Use]]:
    return placements.uses_of(arranged(through.for_one_rank(), stored, {}, Ranks()).held)


def entries(through: Program, stored: Shapes) -> dict[str, TensorEntry]:
    """The stored tensors as they are saved through a program."""
    before, held = placements.through("dp=2", through), uses(through, stored)
    texts = {name: before + placements.division(shape, held[name]).text for name, shape in stored.items()}
    return {name: TensorEntry("F32", shape, "f", 0, (), texts[name]) for name, shape in stored.items()}


def check(saved: dict[str, TensorEntry], now: Program) -> None:
    held = uses(now, {name: entry.shape for name, entry in saved.items()})
    for name, entry in saved.items():
        placements.division(entry.shape, held[name]).check(entry, name, now)


OTHER = {
    "order": ({"qkv": (12, 4)}, "qkv -> q, k, v", "qkv -> k, q, v"),
    "sizes": ({"qkv": (16, 4)}, "qkv -> q, k, v, sizes=[8,4,4]", "qkv -> q, v, k, sizes=[8,4,4]"),
    "second dimension": ({"qkv": (4, 12)}, "qkv -> q, k, v, axis=1", "qkv -> q, v, k, axis=1"),
    "transposed": ({"qkv": (12, 4)}, "qkv -> a, b, c\na^T -> q\nb^T -> k\n c^T -> v",
                   "qkv^T -> k, q, v, axis=1"),
    "heads": (
        {"qkv": (16, 4)},
        "qkv -> q, k, v, fused_qkv, axis=0, num_heads=4, num_key_value_groups=2",
        "qkv -> q, k, v, fused_qkv, axis=0, num_heads=2, num_key_value_groups=1",
    ),
    "groups": (
        {"qkv": (16, 4)},
        "qkv -> q, k, v, fused_qkv, axis=0, num_heads=4, num_key_value_groups=2",
        "qkv -> q, k, v, sizes=[8,4,4]",
    ),
    "stored by ranks": ({"gu": (8, 4)}, "gu -> g, u, fused_ffn, axis=0, ranks=1", "gu -> g, u, fused_ffn, axis=0, ranks=2"),
    "stack": ({"all": (4, 4)}, "all -> e.$EXPERT_ID.w, unstack, count=4", "all -> e.$EXPERT_ID.w, unstack, count=4, axis=1"),
    "experts": ({"all": (9, 4)}, "all -> e[0:9]", "all -> e_1, e_0, e[2:9]"),
    "live order": ({"q": (4, 4), "k": (4, 4)}, "q, k -> qk", "k, q -> qk"),
    "live heads": (
        {"q": (8, 4), "k": (4, 4), "v": (4, 4)},
        "q, k, v -> qkv, fused_qkv, axis=0, num_heads=4, num_key_value_groups=2",
        "q, k, v -> qkv, fused_qkv, axis=0, num_heads=2, num_key_value_groups=1",
    ),
    "live stack": ({"e.0": (2, 2), "e.1": (2, 2)}, "e.$EXPERT_ID -> all, stack", "e.$EXPERT_ID -> all, stack, axis=1"),
    "rotary": ({"q": (8, 3)}, "q -> q", "q -> q, rotary=interleaved, num_heads=2, axis=0"),
    "rotary of heads": (
        {"q": (8, 3)},
        "q -> q, rotary=interleaved, num_heads=1, axis=0",
        "q -> q, rotary=interleaved, num_heads=2, axis=0",
    ),
    "permutation": ({"w": (3, 3, 3)}, "w -> w, permute=[1,0,2]", "w -> w, permute=[2,1,0]"),
    "square": ({"w": (4, 4)}, "w -> w", "w^T -> w"),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(OTHER))
def test_another_division_is_refused(case: str) -> None:
    """In both directions, naming the tensor, both divisions and both programs; the own one always restores."""
    stored, *both = OTHER[case]
    one, other = program("one", both[0]), program("other", both[1])
    for saved, now in ((one, other), (other, one)):
        made = entries(saved, stored)
        check(made, saved)
        with pytest.raises(StateMismatch) as refused:
            check(made, now)
        assert refused.value.members["tensor"] in stored
        assert f"dp=2 through program {saved.name}, hf to ours, and program {now.name!r}" in refused.value.detail
        check(entries(saved._replace(target="theirs"), stored), now)


SAME = {
    "other words": ({"qkv": (12, 4)}, "qkv -> q, k, v", "qkv -> rest, v, sizes=[8,4]\nrest -> q, k"),
    "both transposed": ({"qkv": (12, 4)}, "qkv -> a, b\na^T -> q\nb^T -> k", "qkv^T -> q, k, axis=1"),
    "other names": ({"qkv": (12, 4)}, "qkv -> q, k, v", "qkv -> b, a, c"),
    "fused now": ({"q": (4, 4), "k": (4, 4)}, "q -> q\nk -> k", "q, k -> qk"),
    "live by ranks": ({"g": (4, 3), "u": (4, 3)}, "g, u -> gu, fused_ffn, axis=0", "g, u -> gu, fused_ffn, axis=0, ranks=2"),
    "by other ranks": (
        {"gu": (8, 3)},
        "gu -> gu, fused_ffn, axis=0, src_ranks=2, dst_ranks=1",
        "gu -> gu, fused_ffn, axis=0, src_ranks=2, dst_ranks=4",
    ),
    "padded": ({"w": (4, 4)}, "w -> w", "w -> w, pad_to=6, size=4"),
    "copied": ({"w": (6, 4)}, "w -> w", "w -> w, x, same"),
}


@pytest.mark.parametrize("case", sorted(SAME))
def test_the_same_division_restores(case: str) -> None:
    """However it is written; tensors under other names may be other tensors, and live ones are fused as the mesh wants."""
    stored, *both = SAME[case]
    one, other = program("one", both[0]), program("other", both[1])
    for saved, now in ((one, other), (other, one)):
        check(entries(saved, stored), now)
    check(entries(program("one"), {"w": (6, 4)}), program("other", "w -> w, slice=[1:5, :]"))


def test_what_it_says() -> None:
    """The texts are in checkpoints, so they stay as they are."""
    whole = {"a": (2, 4), "b": (2, 4), "s": (4, 4), "qkv": (12, 4), "big": (9, 2), "q": (8, 3)}
    statements = (
        "a, b -> ab\ns^T -> t\nqkv -> k.w, q.w, v.w\nbig -> e.$EXPERT_ID.w, unstack, count=9\n"
        "q -> r, rotary=interleaved, num_heads=2, axis=0"
    )
    found = entries(program("old", statements), whole)
    before = "dp=2 through program old, hf to ours"
    assert {name: entry.placement.removeprefix(before) for name, entry in found.items()} == {
        "a": ", as ab",
        "b": ", as ab [2, 0]",
        "s": ", transposed, whole",
        "qkv": ", as k.w + q.w + v.w #8ea3959e",
        "big": ", as e.*.w #182d2e0d",
        "q": ", as r #9d9246b9",
    }
    assert {placements.on_ranks(entry.placement) for entry in found.values()} == {before, f"{before}, transposed"}


@pytest.mark.parametrize("placement", ["", "replicate", "dp=2", "Fragment, transposed", "x, hf to ours, by hand"])
def test_what_no_such_program_saved_is_not_compared(placement: str) -> None:
    """As what torch saved, or an import made."""
    assert placements.on_ranks(placement) == placement
    for statements in ("w -> w", "w^T -> w"):
        check({"w": TensorEntry("F32", (4, 4), "f", 0, (), placement)}, program("new", statements))


def test_an_older_checkpoint_says_only_what_was_transposed() -> None:
    older = TensorEntry("F32", (4, 4), "f", 0, (), "through program old, hf to ours, transposed")
    for statements in ("w^T -> w", "w^T -> a, b, axis=0", "w^T -> b, a, axis=0"):
        check({"w": older}, program("new", statements))
    with pytest.raises(StateMismatch, match="'w' was saved transposed, through program old, hf to ours, and program 'new'"):
        check({"w": older}, program("new", "w -> w"))
