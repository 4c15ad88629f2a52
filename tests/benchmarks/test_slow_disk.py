"""The slow disk: its bars are measured on real processes, and a missed one is told."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.slow_disk import measure, missed


def options(policy: str) -> argparse.Namespace:
    return argparse.Namespace(steps=12, mib=1, bytes_per_second=4_000_000, policy=policy)


def test_a_small_run_reaches_what_does_not_depend_on_time(tmp_path: Path) -> None:
    """Every save ends, every drop is recorded three times, and the newest save is committed."""
    found = measure(tmp_path, options("newest-wins"))
    assert found["dropped"]["same_steps"] and found["committed"][-1] == 12
    assert found["dropped"]["tickets"] == found["dropped"]["catalog"] == found["dropped"]["metric"] > 0
    assert len(found["committed"]) + found["dropped"]["tickets"] == 12


def test_a_missed_bar_is_told() -> None:
    """Each of the bars, broken alone, is named."""
    times = {"median": 0.01, "max": 0.02}
    sound: dict[str, Any] = {
        "steps": 3,
        "policy": "newest-wins",
        "seconds": {"save": times, "fence": times, "step": times},
        "committed": [1, 3],
        "dropped": {"tickets": 1, "catalog": 1, "metric": 1, "same_steps": True},
        "write_seconds": {"median": 0.5, "max": 0.5},
        "age_of_a_commit_in_writes": {"median": 1.02, "max": 1.8},
    }
    assert missed(sound) == []
    broken: list[tuple[dict[str, Any], str]] = [
        ({"dropped": {**sound["dropped"], "catalog": 0}}, "disagree"),
        ({"committed": [1, 2, 3]}, "neither committed nor dropped"),
        ({"committed": [1, 2]}, "newest save"),
        ({"seconds": {**sound["seconds"], "save": {"median": 0.01, "max": 0.4}}}, "waited"),
        ({"age_of_a_commit_in_writes": {"median": 2.0, "max": 2.0}}, "older"),
    ]
    for change, word in broken:
        (told,) = missed({**sound, **change})
        assert word in told
