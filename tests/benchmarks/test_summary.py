"""Figures: medians over runs, ratios within runs, nobody and nothing left out."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.bars import bars
from benchmarks.plots import plots
from benchmarks.report import markdown, merged, tables, text
from benchmarks.summary import Figure, Results, figure


def record(number: int, peer: str, **samples: float) -> dict[str, Any]:
    named = {metric.replace("_", ".", 1): [value] for metric, value in samples.items()}
    return {"round": number, "ranks": 1, "peer": peer, "samples": named, "wrong": {}, "checked": 3}


@pytest.fixture
def report() -> dict[str, Any]:
    """Three rounds: the disk gets slower, and Holdfast with it; one peer fails, one loads wrong values."""
    records = []
    for number, slower in enumerate((1.0, 2.0, 4.0)):
        records.append(record(number, "limits", memcpy=0.1, write=0.9 * slower))
        records.append(
            record(number, "holdfast", warm_save=0.005, warm_durable=slower, trained_lost=0.05, first_durable=9.0)
        )
        records.append(record(number, "safetensors", warm_save=2 * slower, warm_durable=2 * slower, trained_lost=1.0))
        records.append({"round": number, "ranks": 1, "peer": "dlrover", "error": "save: no such thing"})
        records.append(
            record(number, "torch-checkpointing", warm_durable=0.1) | {"wrong": {"first save": ["model/a", "model/b"]}}
        )
    machine = {"cpu": "c", "cores": 2, "memory_bytes": 2**30, "kernel": "k", "python": "p", "versions": {"torch": "2"}}
    options = {"state_bytes": 2**30, "tensors": 0, "runs": 3, "seed": 5}
    return {"machine": machine, "options": options, "records": records}


def test_a_figure_has_its_spread() -> None:
    """The median, and the smallest and largest run behind it."""
    assert figure([3.0, 1.0, 8.0]) == Figure(3.0, 1.0, 8.0, 3)
    assert figure([]) is None
    assert text(figure([3.0, 1.0, 8.0]), digits=1) == "3.0 (1.0–8.0)"


def test_ratios_are_taken_within_a_run(report: dict[str, Any]) -> None:
    """A disk that gets slower from run to run changes times, and not what part of its limit is reached."""
    results = Results(report["records"])
    assert results.figure(1, "holdfast", "warm.durable") == Figure(2.0, 1.0, 4.0, 3)
    assert results.ratio(1, ("limits", "write"), ("holdfast", "warm.durable")) == Figure(0.9, 0.9, 0.9, 3)


def test_nobody_is_dropped_silently(report: dict[str, Any]) -> None:
    """Who failed stands in the tables with nothing, and in the last one with the reason; so do wrong values."""
    found = {table.title: table for table in tables(report)}
    stalls = {row[0]: row[1:] for row in found["1 rank(s): how long a save stops the trainer, s"].rows}
    assert set(stalls["DLRover flash checkpoint"]) == {"–"}
    failures = found["1 rank(s): what failed"].rows
    assert ("DLRover flash checkpoint", "3 run(s)", "save: no such thing") in failures
    assert ("torch_checkpointing", "WRONG VALUES", "first save: 6 tensors") in failures


def test_bars_are_judged_by_medians(report: dict[str, Any]) -> None:
    """Kept, missed, or not measured; whoever loads wrong values is no peer to be measured against."""
    found = {bar.text: bar.kept for bar in bars(Results(report["records"]), 1, small=False)}
    assert found["save() returns, s, ≤ 0.01"] is True
    assert found["durable ÷ safetensors + fsync, < 1"] is True
    assert found["time lost ÷ the best peer's, ≤ 0.5"] is True
    assert found["durable ÷ the best asynchronous peer's, ≤ 0.5"] is None
    assert found["warm load ÷ (load_file + copy), ≤ 1.3"] is None


def test_runs_can_be_shown_as_one(report: dict[str, Any]) -> None:
    """Rounds are numbered on, so that a ratio never crosses runs; what is not comparable is refused."""
    both = merged([report, report])
    assert both["options"]["runs"] == 6
    found = Results(both["records"]).figure(1, "holdfast", "warm.save")
    assert found is not None and found.runs == 6
    for change in ({"state_bytes": 1}, {"products": 8}):
        other = report | {"options": report["options"] | change}
        with pytest.raises(ValueError, match=next(iter(change))):
            merged([report, other])


def test_markdown_has_every_table(report: dict[str, Any]) -> None:
    """Titles, columns and rows of each."""
    lines = markdown(report).splitlines()
    for table in tables(report):
        assert f"### {table.title}" in lines
    assert any(line.startswith("| Holdfast |") for line in lines)


def test_plots_show_what_was_measured(report: dict[str, Any]) -> None:
    """A plot of which nothing was measured is not drawn, and a peer without a figure has no row in it."""
    found = {plot.name: plot for plot in plots(report)}
    assert "load-1" not in found and "memory-1" not in found
    assert [row[0] for row in found["lost-1"].rows] == ["Holdfast", "safetensors + fsync"]
    assert found["save-1"].limit == Figure(0.1, 0.1, 0.1, 3)
