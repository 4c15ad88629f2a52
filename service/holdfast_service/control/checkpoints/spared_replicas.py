"""Decides which rank of a node stages a box that several of its ranks hold, once a save has compared all of its bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from holdfast_formats.region import Box
from holdfast_formats.staging import replica_claims
from holdfast_formats.staging.plan import WritePlan
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_formats.tensors import box_bytes
from holdfast_service.control.checkpoints.replica_claims import SharedBoxes


def spared(plan: WritePlan, tables: Sequence[SlotTable]) -> dict[int, str]:
    """What each rank need not stage from now on, as `Outcome.spares`: the claims that this committed plan, of one node,
    did not read from it. So bytes stay balanced over ranks, and nothing is decided that a plan has not tried.
    """
    ordered = sorted(tables, key=lambda table: table.rank)
    if not any(_claims(table) for table in ordered):  # as in nearly all saves
        return {}
    claimed = [
        (replicated, numbers)
        for replicated, numbers in SharedBoxes.of(ordered).claimed(ordered)
        if box_bytes(replicated.spec, replicated.box) >= replica_claims.SPARED_BYTES_MIN
    ]
    if not claimed:
        return {}
    counts = [len(table.digests) // replica_claims.ROW_BYTES for table in ordered]
    bits = np.zeros(sum(counts), np.bool_)
    read = _read(plan)
    for replicated, numbers in claimed:
        stages = read.get((replicated.spec.group, replicated.spec.name, replicated.box))
        if stages is not None:
            for rank, number in zip(replicated.ranks, numbers, strict=True):
                bits[number] = rank != stages
    parts = np.split(bits, np.cumsum(counts)[:-1])
    return {table.rank: replica_claims.encode_bits(part) for table, part in zip(ordered, parts, strict=True)}


def _claims(table: SlotTable) -> bool:
    """Whether it claims a whole box."""
    rows = np.frombuffer(table.digests, "<u8").reshape(-1, 2)
    return bool((rows != 0).all(axis=1).any())


def _read(plan: WritePlan) -> dict[tuple[str, str, Box], int]:
    """The rank from whose slot the plan reads each box."""
    return {
        (tensor.spec.group, tensor.spec.name, origin.box): origin.rank
        for file in plan.files
        for tensor in file.tensors
        for origin in tensor.origins
        if not origin.held_as
    }
