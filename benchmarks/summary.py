"""From samples to figures: medians over runs with their spread, and ratios of values of the same run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

Record = Mapping[str, Any]

LIMITS = "limits"


class Figure(NamedTuple):
    """The median over runs, the smallest and the largest run, and how many there were. No run is left out."""

    median: float
    low: float
    high: float
    runs: int


def figure(values: Iterable[float]) -> Figure | None:
    """None when nothing was measured."""
    held = list(values)
    return Figure(median(held), min(held), max(held), len(held)) if held else None


class Results:
    """The records of a run, by number of ranks, peer, metric and round."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records

    def ranks(self) -> list[int]:
        return sorted({record["ranks"] for record in self._records})

    def peers(self, ranks: int) -> list[str]:
        """The names of all who were run; the machine's limits are nobody."""
        return sorted({r["peer"] for r in self._records if r["ranks"] == ranks and r["peer"] != LIMITS})

    def by_round(self, ranks: int, peer: str, metric: str) -> dict[int, float]:
        """A round's value is the median of its samples."""
        found = {}
        for record in self._of(ranks, peer):
            samples = record.get("samples", {}).get(metric)
            if samples:
                found[record["round"]] = median(samples)
        return found

    def figure(self, ranks: int, peer: str, metric: str) -> Figure | None:
        return figure(self.by_round(ranks, peer, metric).values())

    def ratio(self, ranks: int, over: tuple[str, str], under: tuple[str, str]) -> Figure | None:
        """(peer, metric) divided by (peer, metric), run by run; runs in which either failed have no ratio."""
        above, below = self.by_round(ranks, *over), self.by_round(ranks, *under)
        return figure(above[number] / below[number] for number in above if below.get(number))

    def loads(self, ranks: int) -> list[tuple[str, str]]:
        """(peer, way) of every way to load that was measured."""
        found = {
            (record["peer"], metric.split(".", 1)[1].rpartition(".")[0])
            for record in self._records
            if record["ranks"] == ranks
            for metric in record.get("samples", {})
            if metric.startswith(("load.", "reshard."))
        }
        return sorted(found)

    def checked(self, ranks: int, peer: str) -> int:
        return sum(record.get("checked", 0) for record in self._of(ranks, peer))

    def wrong(self, ranks: int, peer: str) -> dict[str, int]:
        """What was loaded wrongly: how many tensors of which save or load, added up over the runs."""
        found: dict[str, int] = {}
        for record in self._of(ranks, peer):
            for what, names in record.get("wrong", {}).items():
                found[what] = found.get(what, 0) + len(names)
        return found

    def errors(self, ranks: int, peer: str) -> dict[str, int]:
        """Why runs have no result, and how many."""
        found: dict[str, int] = {}
        for record in self._of(ranks, peer):
            if record.get("error"):
                found[record["error"]] = found.get(record["error"], 0) + 1
        return found

    def _of(self, ranks: int, peer: str) -> list[Record]:
        return [record for record in self._records if record["ranks"] == ranks and record["peer"] == peer]
