"""Saves into a bucket beside other clients: what is measured, and which bars are missed."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import objects
from benchmarks.objects import BARE, CHECKED, Compared, Cost, Costs, Wanted


def costs(wall_s: float, processor_s: float = 0.3) -> Costs:
    return Costs([Cost(wall_s, processor_s)] * 3)


def compared(up: Costs, bare: Costs, down: Costs, read: float = 1.0) -> Compared:
    ups = {CHECKED: up, BARE: bare, "botocore": costs(5.0), "obstore": costs(2.0)}
    return Compared("weed", "crc32", ups, {CHECKED: down, "botocore": costs(1.0), "obstore": costs(3.0)}, read)


def test_bars() -> None:
    """Speed is beside the faster of the others; the processor's time is without checksums up, and without digests down."""
    checking = {"digests": 0.1}
    assert objects.missed(compared(costs(2.2, 0.9), costs(2.2, 0.5), costs(1.1, 0.6), 1.05), checking) == []
    said = objects.missed(compared(costs(2.3), costs(2.3, 0.51), costs(1.2, 0.61), 1.06), checking)
    assert [one.partition(":")[0] for one in said] == ["weed, up", "weed, down", "weed, up", "weed, down", "weed"]
    assert json.loads(json.dumps(compared(costs(1.0), costs(1.0), costs(1.0)).as_json()))["up"][CHECKED][0] == [1.0, 0.3]


def test_each_way_begins_in_turn() -> None:
    """As often as was asked for, after a round that does not count."""
    done, rested = list[str](), list[str]()
    acts = {name: (lambda name=name: done.append(name)) for name in ("a", "b", "c")}
    found = objects.rounds(acts, Wanted(1, 2), 2**20, rested.append)
    assert done == rested == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert [len(one.each) for one in found.values()] == [2, 2, 2]


def test_a_checkpoint_in_memory(tmp_path: Path) -> None:
    """Four long files, all others, and memory for each tensor."""
    stored = objects.made(tmp_path / "step", 8)
    assert len(stored.files) == objects.FILES and 8 * 2**20 <= stored.size < 9 * 2**20
    assert sum(target.nbytes for target in stored.tensors.values()) == 8 * 2**20
    assert sum(data.nbytes for _, _, data in stored.parts()) == stored.size
