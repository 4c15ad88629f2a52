"""state.json: the JSON part of a checkpoint, merged from all ranks and given back to any rank of any world.

    {"format": 1, "step": 500, "metrics": {"loss": 2.5},
     "groups": {"extra": {"scheduler": {"all": …}, "loader": {"ranks": {"0": …, "1": …}}}}}

A value on which all ranks agree is stored once, under `all`; the others under `ranks`, by rank. `source` says what an
imported checkpoint was made of, for people; a restore asks whether it is there, for another program has keys of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from holdfast_formats import metric_values
from holdfast_formats.errors import CorruptManifest, InvalidRequest

FORMAT = 1
SOURCE = "source"
Values = dict[str, dict[str, str]]  # group -> key -> JSON document as text


class RankValues(NamedTuple):
    """The contents of state.json for one rank, by the rule of `for_rank`. Names are `group/key`. `remapped` are values
    that another rank wrote, `ranked` all values that differ between ranks.
    """

    values: Values
    remapped: tuple[str, ...]
    ranked: tuple[str, ...] = ()


def merge(step: int, metrics: Mapping[str, float], groups: Sequence[str], ranks: Mapping[int, Values]) -> bytes:
    """Merge every rank's values into the bytes of state.json; the order of ranks and keys does not matter.

    Raises `InvalidRequest`, by group and key, for a value that is not a JSON document.
    """
    merged: dict[str, dict[str, Any]] = {group: {} for group in groups}
    for group in groups:
        keys = sorted({key for values in ranks.values() for key in values.get(group, {})})
        for key in keys:
            held = {rank: v[group][key] for rank, v in sorted(ranks.items()) if key in v.get(group, {})}
            try:
                merged[group][key] = _merge_one(held, len(ranks))
            except (ValueError, RecursionError) as error:
                raise InvalidRequest(f"value {key!r} of group {group!r} is not a JSON document: {error}") from error
    finite, words = metric_values.split(metrics)
    document = {"format": FORMAT, "step": step, "metrics": finite, "groups": merged}
    if words:
        document["nonfinite_metrics"] = words
    try:  # ASCII, so that a string that is not valid Unicode survives
        return json.dumps(document, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"
    except ValueError as error:
        raise InvalidRequest(f"the state contains a number that JSON cannot represent: {error}") from error


def with_source(encoded: bytes, source: Mapping[str, Any]) -> bytes:
    """Add the JSON object `source`, which describes what the checkpoint was converted from."""
    document = {**json.loads(encoded), SOURCE: source}
    return json.dumps(document, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def without_groups(encoded: bytes, groups: Collection[str]) -> bytes:
    """Remove these groups; `CorruptManifest` for an invalid document."""
    with _read(encoded) as held:
        document = {**json.loads(encoded), "groups": {name: held[name] for name in held if name not in groups}}
        return json.dumps(document, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def source_of(encoded: bytes) -> Mapping[str, Any] | None:
    """The source of an imported checkpoint; None for a saved one. `CorruptManifest` for an invalid document."""
    with _read(encoded):
        source = json.loads(encoded).get(SOURCE)
        if source is not None and not isinstance(source, dict):
            raise ValueError("its source is not an object")
        return source


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _merge_one(held: Mapping[int, str], world: int) -> dict[str, Any]:
    parsed = {rank: json.loads(text, parse_constant=_no_constant) for rank, text in held.items()}
    if len(held) == world and len(set(held.values())) == 1:
        return {"all": next(iter(parsed.values()))}
    return {"ranks": {str(rank): value for rank, value in parsed.items()}}


def for_rank(encoded: bytes, rank: int, heirs: Callable[[str, str], int] | None = None) -> RankValues:
    """The values that `rank` restores.

    Values that were the same on all ranks go to every rank, others to the rank that wrote them. A rank that wrote nothing,
    as in a larger world, gets the value of writer number `rank mod writers`, counted in rank order, and the name is
    reported. For a group and key, `heirs` may name another rank whose value to take. Raises `CorruptManifest` if the
    document is invalid.
    """
    values: Values = {}
    remapped: list[str] = []
    ranked: list[str] = []
    with _read(encoded) as groups:
        for group, entries in groups.items():
            values[group] = {}
            for key, entry in entries.items():
                name = f"{group}/{key}"
                value, moved = _pick(entry, rank if heirs is None else heirs(group, key))
                values[group][key] = json.dumps(value, sort_keys=True)
                if moved:
                    remapped.append(name)
                if "all" not in entry:
                    ranked.append(name)
    return RankValues(values, tuple(sorted(remapped)), tuple(sorted(ranked)))


def by_rank(encoded: bytes, group: str) -> dict[str, dict[int, str]]:
    """The values of a group that differ between ranks: by key, then by the rank that wrote it, in rank order."""
    with _read(encoded) as groups:
        differing = {key: entry["ranks"] for key, entry in groups.get(group, {}).items() if "all" not in entry}
        return {
            key: {int(rank): json.dumps(ranks[rank], sort_keys=True) for rank in sorted(ranks, key=int)}
            for key, ranks in differing.items()
        }


@contextmanager
def _read(encoded: bytes) -> Iterator[dict[str, Any]]:
    """The document's groups; `CorruptManifest` for anything invalid in it."""
    try:
        document = json.loads(encoded, parse_constant=_no_constant)
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']} is not {FORMAT}")
        yield document["groups"]
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CorruptManifest(f"cannot read state.json: {error}", file="state.json") from error


def _pick(entry: Mapping[str, Any], rank: int) -> tuple[Any, bool]:
    if "all" in entry:
        return entry["all"], False
    ranks = entry["ranks"]
    if str(rank) in ranks:
        return ranks[str(rank)], False
    writers = sorted(ranks, key=int)
    return ranks[writers[rank % len(writers)]], True
