"""What the crash lab tried and what came of it: counted lane by lane, printed at the end, and written as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass
class Lane:
    """Faults of one kind. `bytes_lost`: committed, and gone. `bytes_wrong`: handed over, and not what was saved."""

    tried: int = 0
    survived: int = 0
    bytes_lost: int = 0
    bytes_wrong: int = 0


_lanes: dict[str, Lane] = {}


def tried(lane: str, count: int = 1) -> None:
    """Faults that are about to be made; they count as not survived until `survived` says otherwise."""
    _lanes.setdefault(lane, Lane()).tried += count


def survived(lane: str, count: int = 1) -> None:
    """That many of them ended as they must, with all that was committed read back bit by bit."""
    _lanes[lane].survived += count


def lost(lane: str, count: int) -> None:
    """Committed bytes that could not be read any more."""
    _lanes[lane].bytes_lost += count


def wrong(lane: str, count: int) -> None:
    """Bytes that were handed over and were not those that had been saved."""
    _lanes[lane].bytes_wrong += count


def lines() -> list[str]:
    """The table, empty where nothing was tried."""
    if not _lanes:
        return []
    total = Lane(*(sum(column) for column in zip(*(asdict(lane).values() for lane in _lanes.values()), strict=True)))
    width = max(len(name) for name in (*_lanes, "all"))
    head = f"{'lane':<{width}}  {'faults tried':>12}  {'survived':>9}  {'bytes lost':>10}  {'wrong bytes':>11}"
    rows = [
        f"{name:<{width}}  {lane.tried:>12}  {lane.survived:>9}  {lane.bytes_lost:>10}  {lane.bytes_wrong:>11}"
        for name, lane in (*_lanes.items(), ("all", total))
    ]
    return [head, *rows]


def write(path: Path) -> None:
    """The same as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({name: asdict(lane) for name, lane in _lanes.items()}, indent=1) + "\n")
