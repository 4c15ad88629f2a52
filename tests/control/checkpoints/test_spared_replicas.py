"""Whichever rank stages a replica for others, the files are the same; and one rank always stages what others leave out."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.errors import StateMismatch
from holdfast_formats.naming import Place
from holdfast_formats.region import Box
from holdfast_formats.staging import replica_claims
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_formats.tensors import StagedFragment, TensorSpec
from holdfast_service.control.checkpoints import commit, planner, spared_replicas
from holdfast_service.daemon.writing import writer
from holdfast_service.storage import MemoryTier, PosixStore
from tests.daemon.writing.test_path import Shards, files_of

WORLD = 3


def written(shards: Shards, tables: list[SlotTable]) -> dict[str, bytes]:
    """The files of a checkpoint of these tables."""
    tier = MemoryTier()
    store, plan = PosixStore(tier), planner.plan(tables)
    staged = store.begin(Place("r", shards.step, shards.attempt))
    writer.write(staged, plan, {rank: memoryview(bytes(data)) for rank, data in enumerate(shards.data)}, "node")
    commit.publish(store, plan, "2026-01-01T00:00:00Z")
    found = files_of(tier)
    assert any(name.endswith(".safetensors") for name in found)
    return found


def claiming(table: SlotTable, sampled: list[int], whole: list[int]) -> SlotTable:
    return msgspec.structs.replace(table, digests=np.array([sampled, whole], "<u8").T.tobytes())


@st.composite
def held(draw: st.DrawFn) -> tuple[list[int], dict[tuple[int, int], set[int]]]:
    """Sizes of tensors; and of each part, by tensor and first byte, the ranks that hold it."""
    sizes = draw(st.lists(st.integers(1, 300), min_size=1, max_size=5))
    holders = {}
    for number, size in enumerate(sizes):
        for begin in {0, size // 2}:
            holders[number, begin] = draw(st.sets(st.integers(0, WORLD - 1), min_size=1))
    return sizes, holders


@given(held(), st.data())
def test_any_assignment_of_replicas_gives_the_same_files(
    given_held: tuple[list[int], dict[tuple[int, int], set[int]]], data: st.DataObject
) -> None:
    """Of each part any ranks but one leave it to the others."""
    sizes, holders = given_held
    everything, some = Shards(WORLD), Shards(WORLD)
    unstaged: list[list[StagedFragment]] = [[] for _ in range(WORLD)]
    for number, size in enumerate(sizes):
        spec = TensorSpec("model", f"t.{number}", "U8", (size,))
        content = np.random.default_rng(number).integers(0, 256, size, np.uint8).tobytes()
        for begin, end in pairwise([*sorted({0, size // 2}), size]):
            ranks, box = holders[number, begin], Box((begin,), (end - begin,))
            stays = data.draw(st.sets(st.sampled_from(sorted(ranks)), min_size=1))
            everything.add(spec, content, [(rank, [box]) for rank in sorted(ranks)])
            some.add(spec, content, [(rank, [box] if rank in stays else []) for rank in sorted(ranks)])
            for rank in ranks - stays:
                unstaged[rank].append(StagedFragment(spec, (box,), 0))
    tables = [
        msgspec.structs.replace(table, unstaged=tuple(parts)) for table, parts in zip(some.tables(), unstaged, strict=True)
    ]
    assert written(some, tables) == written(everything, everything.tables())
    for rank, parts in enumerate(unstaged):
        for part in parts:  # and if its last holder does not stage it either, that is noticed
            lost = [
                msgspec.structs.replace(
                    table,
                    fragments=tuple(f for f in table.fragments if f.spec != part.spec or not set(f.boxes) & set(part.boxes)),
                )
                for table in tables
            ]
            with pytest.raises(StateMismatch, match=f"rank {rank} left it|rank . left it"):
                planner.plan(lost)


@given(held())
def test_each_claimed_box_is_staged_by_the_rank_from_which_it_was_read(
    given_held: tuple[list[int], dict[tuple[int, int], set[int]]],
) -> None:
    """All of its other holders are spared it, and nothing else."""
    sizes, holders = given_held
    shards = Shards(WORLD)
    rows: list[list[int]] = [[7] for _ in range(WORLD)]
    keys: list[list[tuple[int, int]]] = [[(-1, rank)] for rank in range(WORLD)]
    for rank in range(WORLD):  # each has one of its own
        shards.add(TensorSpec("model", f"own.{rank}", "U8", (1,)), b"x", [(rank, [Box((0,), (1,))])])
    for number, size in enumerate(sizes):
        spec = TensorSpec("model", f"t.{number}", "U8", (size,))
        for begin, end in pairwise([*sorted({0, size // 2}), size]):
            shards.add(
                spec, bytes(size), [(rank, [Box((begin,), (end - begin,))]) for rank in sorted(holders[number, begin])]
            )
            for rank in holders[number, begin]:
                rows[rank].append(1 + number)
                keys[rank].append((number, begin))
    tables = [claiming(table, mine, mine) for table, mine in zip(shards.tables(), rows, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_claims, "SPARED_BYTES_MIN", 1)
        plan = planner.plan(tables)
        told = spared_replicas.spared(plan, tables)
        sampled = [claiming(table, mine, [0] * len(mine)) for table, mine in zip(shards.tables(), rows, strict=True)]
        assert spared_replicas.spared(planner.plan(sampled), sampled) == {}
    times: Counter[tuple[int, int]] = Counter()
    for rank in range(WORLD):
        bits = replica_claims.decode_bits(told.get(rank, ""), len(keys[rank]))
        times.update(key for key, bit in zip(keys[rank], bits, strict=True) if bit)
    assert times == Counter({key: len(ranks) - 1 for key, ranks in holders.items() if len(ranks) > 1})
    for file in plan.files:
        for tensor in file.tensors:
            for origin in tensor.origins if tensor.spec.name.startswith("t.") else ():
                key = int(tensor.spec.name[2:]), origin.box.offset[0]
                bits = replica_claims.decode_bits(told.get(origin.rank, ""), len(keys[origin.rank]))
                assert not bits[keys[origin.rank].index(key)]


def test_small_boxes_are_not_spared() -> None:
    """A sample costs as much memory traffic as they do, and what each stages stays simple."""
    shards = Shards(2)
    shards.add(TensorSpec("model", "w", "U8", (9,)), bytes(9), [(rank, [Box((0,), (9,))]) for rank in range(2)])
    tables = [claiming(table, [1], [1]) for table in shards.tables()]
    assert spared_replicas.spared(planner.plan(tables), tables) == {}
