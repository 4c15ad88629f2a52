"""A save of several nodes has one average, of the same updates on all ranks, or none; every node comes to the same end."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from holdfast_formats.errors import CheckpointError, ReplicasDiffer, StateMismatch
from holdfast_formats.region import Box
from holdfast_formats.staging import average, declaration, part, replica_claims
from holdfast_formats.staging.average import AverageHandover, AverageState
from holdfast_formats.staging.part import DecodedPart
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_formats.tensors import StagedFragment, TensorSpec
from holdfast_service.control.checkpoints import planner
from holdfast_service.wings.cluster.saving import share_planner
from holdfast_service.wings.cluster.saving.joint_averages import settled

WORLD = 4
STATE = AverageState("master", 0.9, 10, "bias", n=5, step=50)


def table(rank: int, state: AverageState | None = STATE, history: str = "h", after: int = 5) -> SlotTable:
    """A rank with rows of a weight and of its average, which the daemon keeps."""
    specs = [TensorSpec("model", "w", "F32", (WORLD, 8)), TensorSpec("ema", "w", "F32", (WORLD, 8))]
    held = [StagedFragment(spec, (Box((rank, 0), (1, 8)),), 64 * number) for number, spec in enumerate(specs)]
    groups, values = ("model", "ema"), {"model": {"m": "1"}}
    if state is None:
        groups, held = ("model",), held[:1]
    else:
        values["ema"] = {"average": average.encode_state(state)}
    handover = AverageHandover(64, 32, after, "l", history=history if state else "")
    digests = bytes([rank + 1]) * replica_claims.ROW_BYTES + bytes(replica_claims.ROW_BYTES)
    digests = digests[: len(held) * replica_claims.ROW_BYTES]
    given: dict[str, Any] = {"aliases": {"ema": {"v": "w"}} if state else {}, "digests": digests, "average": handover}
    return SlotTable("r", 60, 1, rank, WORLD, groups, tuple(held), values, **given)


def parts(tables: Sequence[SlotTable]) -> list[tuple[str, DecodedPart]]:
    """Two nodes, each with every other rank."""
    found = []
    for node in (0, 1):
        encoded = part.encode(tables[node::2])
        read = part.decode(declaration.decode(encoded.declaration), encoded.said)
        found.append((hashlib.sha256(encoded.declaration).hexdigest(), read))
    return found


def saved(tables: Sequence[SlotTable]) -> tuple[tuple[str, ...], set[str]]:
    """The groups of the plan that both nodes make, and those of its files' tensors."""
    share_planner.forget()
    first, second = (share_planner.plan_share(parts(tables), node).plan for node in (0, 1))
    assert first.groups == second.groups and first.state == second.state
    assert first.lacks_average == second.lacks_average == ("ema" not in first.groups)
    layouts = [[file.layout for file in plan.files] for plan in (first, second)]
    assert layouts[0] == layouts[1]
    return first.groups, {tensor.spec.group for file in first.files for tensor in file.tensors}


def test_averages_of_the_same_updates_are_one() -> None:
    """What is missing is told as the lowest rank counts it."""
    lost = msgspec.structs.replace(STATE, lost=2)
    tables = [table(0), table(1, lost), table(2), table(3, lost)]
    found = [one for _, of in settled(parts(tables)) for one in of.said]
    assert {one.values["ema"]["average"] for one in found} == {average.encode_state(STATE)}
    assert saved(tables) == (("model", "ema"), {"model", "ema"})


@pytest.mark.parametrize(
    "other",
    [
        table(3, msgspec.structs.replace(STATE, n=4, step=40)),
        table(3, history="other"),
        table(3, msgspec.structs.replace(STATE, decay=0.99)),
        table(3, None),
    ],
)
def test_a_mixture_is_left_out_by_name(other: SlotTable, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever differs: the save is whole without the average, as if it had never been staged."""
    tables = [table(0), table(1), table(2), other]
    assert saved(tables) == (("model",), {"model"})
    assert "rank 0 has an average of 5 updates, the last at step 50, but rank 3 " in caplog.text
    bare = settled(parts([table(rank, None) for rank in range(WORLD)]))
    for (_, found), (_, want) in zip(settled(parts(tables)), bare, strict=True):
        assert [found.declaration.fragments(at) for at in range(2)] == [want.declaration.fragments(at) for at in range(2)]
        for one, of in zip(found.said, want.said, strict=True):
            assert (one.groups, one.values, one.aliases, one.digests) == (of.groups, of.values, of.aliases, of.digests)


def replicated(rank: int, weight: int = 1, mean: int = 1) -> SlotTable:
    """A rank that claims to hold the same weight and average as all others: the numbers stand for what it holds."""
    made = table(rank)
    held = tuple(StagedFragment(one.spec, (Box((0, 0), (WORLD, 8)),), 512 * at) for at, one in enumerate(made.fragments))
    rows = b"".join(number.to_bytes(8, "little") + bytes(8) for number in (weight, mean))
    return msgspec.structs.replace(made, fragments=held, digests=rows)


def test_an_average_that_differs_between_replicas_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """On one node as on several: none of them is the average. Weights that differ are refused as always."""
    same = [replicated(rank) for rank in range(WORLD)]
    assert saved(same) == (("model", "ema"), {"model", "ema"}) and planner.plan(same).groups == ("model", "ema")
    apart = [*same[:2], replicated(2, mean=5), same[3]]
    assert saved(apart) == (("model",), {"model"})
    made = planner.plan(apart)
    assert made.groups == ("model",) and made.lacks_average and made.state == planner.plan(apart[::-1]).state
    assert [file.layout.name for file in made.files] == ["model.safetensors"]
    assert caplog.text.count("saved without its average") == 4 and "ema/w on rank 2 differs" in caplog.text
    for wrong in ([*apart[:3], replicated(3, weight=2)], [*same[:3], replicated(3, weight=2)]):
        with pytest.raises(ReplicasDiffer, match="model/w"):
            saved(wrong)
        with pytest.raises(ReplicasDiffer, match="model/w"):
            planner.plan(wrong)
    own = [msgspec.structs.replace(one, average=None) for one in apart]  # the trainers' own: they are told
    with pytest.raises(ReplicasDiffer, match="ema/w"):
        planner.plan(own)


def test_a_save_before_the_first_update_has_none() -> None:
    """On all ranks alike; and ranks without `ema=` are not looked at."""
    assert saved([table(rank, None) for rank in range(WORLD)]) == (("model",), {"model"})
    plain = [msgspec.structs.replace(table(rank), average=None) for rank in range(WORLD)]
    found = parts(plain)
    assert all(one is other for (_, one), (_, other) in zip(settled(found), found, strict=True))


def test_ranks_that_do_not_do_the_same_are_refused() -> None:
    """They count their updates differently, or some keep an average of their own."""
    with pytest.raises(CheckpointError, match="rank 3 had 6 updates"):
        settled(parts([table(0), table(1), table(2), table(3, after=6)]))
    own = msgspec.structs.replace(table(3), average=None)
    with pytest.raises(StateMismatch, match="rank 3 saves its own average"):
        settled(parts([table(0), table(1), table(2), own]))
