"""The averages of ranks on several nodes in one save: of the same updates on all of them, or left out. Pure.

All nodes read the same tables, so they reach the same result.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from holdfast_formats.errors import CheckpointError, StateMismatch
from holdfast_formats.staging import average, declaration, slot_table
from holdfast_formats.staging.average import GROUP, VALUE, AverageState
from holdfast_formats.staging.part import DecodedPart
from holdfast_formats.staging.slot_table import SlotTable

log = logging.getLogger(__name__)

LEFT_OUT = " without averages"  # added to the digest of a declaration


class _Kind(NamedTuple):
    """What has to be the same on all ranks to join their averages."""

    history: str
    n: int
    step: int
    rule: tuple[str, float, int, str]


def settled(parts: Sequence[tuple[str, DecodedPart]]) -> list[tuple[str, DecodedPart]]:
    """The parts of all nodes, each with its declaration's digest, in which all ranks have one average, or none has any.

    `CheckpointError` where ranks count their updates differently, `StateMismatch` where some have an average of their own.
    """
    tables = sorted((table for _, part in parts for table in part.said), key=lambda table: table.rank)
    kept = [table for table in tables if table.average is not None]
    if not kept:
        return list(parts)
    _check(tables)
    kinds = {_kind(table) for table in tables}
    if kinds == {None}:
        return list(parts)
    if len(kinds) == 1:
        text = tables[0].values[GROUP][VALUE]
        return [(digest, part._replace(said=[_saying(table, text) for table in part.said])) for digest, part in parts]
    log.warning("step %d of %s is saved without its average: %s", tables[0].step, tables[0].run, _differences(tables))
    return without(parts)


def without(parts: Sequence[tuple[str, DecodedPart]]) -> list[tuple[str, DecodedPart]]:
    """The parts of all nodes as if no average had been saved."""
    return [(digest + LEFT_OUT, _without(part)) for digest, part in parts]


def _check(tables: Sequence[SlotTable]) -> None:
    own = [table.rank for table in tables if table.average is None and GROUP in table.groups]
    if own:
        raise StateMismatch(
            f"rank {own[0]} saves its own average, but on other ranks the daemon computes it",
            hint="pass the same ema= to Checkpointer on every rank",
        )
    first = next(table for table in tables if table.average is not None)
    for table in tables:
        if table.average is not None and first.average is not None and table.average.after != first.average.after:
            raise CheckpointError(
                f"rank {table.rank} had {table.average.after} updates of its average before this save, "
                f"but rank {first.rank} had {first.average.after}",
                hint="every rank must take the same optimizer steps, or call ema.update() equally often",
            )


def _state(table: SlotTable) -> AverageState | None:
    if table.average is None or GROUP not in table.groups:
        return None
    return average.decode_state(table.values[GROUP][VALUE])


def _kind(table: SlotTable) -> _Kind | None:
    state = _state(table)
    if state is None or table.average is None:
        return None
    rule = state.of, state.decay, state.every, state.correction
    return _Kind(table.average.history, state.n, state.step, rule)


def _differences(tables: Sequence[SlotTable]) -> str:
    """Describe the first rank's counts and the first different ones."""
    first = tables[0]
    other = next(table for table in tables if _kind(table) != _kind(first))
    return f"rank {first.rank} has {_words(first)}, but rank {other.rank} has {_words(other)}"


def _words(table: SlotTable) -> str:
    state = _state(table)
    return "none" if state is None else f"an average of {state.n} updates, the last at step {state.step}"


def _saying(table: SlotTable, text: str) -> SlotTable:
    values = table.values[GROUP]
    if values[VALUE] == text:
        return table
    return msgspec.structs.replace(table, values={**table.values, GROUP: {**values, VALUE: text}})


def _without(part: DecodedPart) -> DecodedPart:
    declared = declaration.without(part.declaration, GROUP)
    boxes = (declared.first_box[1:] - declared.first_box[:-1]).tolist()
    tables = [slot_table.without(table, GROUP, count) for table, count in zip(part.said, boxes, strict=True)]
    return DecodedPart(declared, tables)
