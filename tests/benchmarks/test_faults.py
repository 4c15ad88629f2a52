"""The judge of faults tells every outcome from digests, and a real fault is found for what it is."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fault_lab.campaign import CUT, DURING, FLIP, FULL, Campaign, Plan, Result, as_json, from_json
from benchmarks.fault_lab.damage import cut, flip
from benchmarks.fault_lab.events import chained, heard
from benchmarks.fault_lab.judge import Kind, Loaded, Outcome, Report, judge, worst
from benchmarks.fault_lab.peers import PEERS
from benchmarks.fault_lab.table import cell, markdown
from benchmarks.faults import merged

SAVED = {1: {"a#0": "one", "b#0": "one"}, 2: {"a#0": "two", "b#0": "two"}, 3: {"a#0": "three", "b#0": "three"}}
MIXED = {"a#0": "three", "b#0": "two"}


@pytest.mark.parametrize(
    ("report", "kind", "step"),
    [
        (Report(Loaded(3, SAVED[3])), Kind.NEWEST, 3),
        (Report(Loaded(2, SAVED[2])), Kind.EARLIER, 2),
        (Report(Loaded(3, MIXED)), Kind.WRONG, 3),
        (Report(Loaded(3, SAVED[2])), Kind.WRONG, 3),  # right values, but not those of the step that it says
        (Report(Loaded(3, {"a#0": "three"})), Kind.WRONG, 3),
        (Report(Loaded(7, SAVED[3])), Kind.WRONG, 7),
        (Report(Loaded(0, {"a#0": "zeros", "b#0": "zeros"})), Kind.NOTHING, 0),
        (Report(Loaded(2, SAVED[2]), "OSError: x"), Kind.REFUSED, 2),
        (Report(Loaded(2, MIXED), "OSError: x"), Kind.LOST, 0),
        (Report(None, "OSError: x"), Kind.LOST, 0),
    ],
)
def test_an_outcome_is_told_from_digests(report: Report, kind: Kind, step: int) -> None:
    """Values and the step that the peer says must agree, and every tensor counts."""
    outcome = judge(SAVED, report)
    assert (outcome.kind, outcome.step) == (kind, step)


def test_an_error_that_says_the_file_is_told_from_one_that_does_not() -> None:
    """The damaged file's own name must be in it, or in an error that caused it."""
    try:
        try:
            raise ValueError("model.safetensors: digest differs")
        except ValueError as error:
            raise RuntimeError("cannot restore") from error
    except RuntimeError as error:
        text = chained(error)
    assert judge(SAVED, Report(None, text), ["model.safetensors"]).named
    assert not judge(SAVED, Report(None, "RuntimeError: cannot restore"), ["model.safetensors"]).named


def test_the_worst_outcome_comes_first() -> None:
    """Silence about wrong values is worse than silence about no checkpoint, and both are worse than an error."""
    kinds = [Kind.NEWEST, Kind.WRONG, Kind.LOST, Kind.NOTHING, Kind.REFUSED]
    outcomes = [Outcome(kind, 3) for kind in kinds]
    assert worst(outcomes).kind is Kind.WRONG
    results = [Result(FLIP, "", outcome) for outcome in outcomes]
    assert cell(results) == "**wrong values** ×1; **from zero** ×1; **nothing loads** ×1; error ×1; newest ×1"


def test_a_kill_that_came_late_says_nothing() -> None:
    """It is left out, and where all were late there is no result."""
    early, late = Result(DURING, "", Outcome(Kind.EARLIER, 2)), Result(DURING, "", Outcome(Kind.NEWEST, 3), late=True)
    assert cell([early, late]) == "one before ×1"
    assert cell([late]) == "–"


def test_results_come_back_from_json_and_a_missing_peer_says_why() -> None:
    """What was run before can be shown again; a peer that cannot be installed keeps its row."""
    result = Result(FULL, "", Outcome(Kind.EARLIER, 2), sees="save(): OSError: [Errno 28] No space left on device")
    assert from_json(as_json(result)) == result
    peers = {"dcp": {"results": [as_json(result)], "errors": {}, "versions": {"torch": "2"}}, "orbax": {"error": "no wheel"}}
    text = markdown({"faults": [FULL, CUT], "peers": peers})
    assert "one before ×1; told: `OSError` by save()" in text
    assert "no result: no wheel" in text


def test_runs_are_shown_as_one_and_none_hides_what_another_found() -> None:
    """Outcomes of the same fault are added up, but for faults that nobody asks to be shown."""

    def run(*faults: str, kind: Kind) -> dict[str, Any]:
        results = [as_json(Result(fault, "", Outcome(kind, 3))) for fault in faults]
        return {"faults": list(faults), "peers": {"dcp": {"results": results, "errors": {}, "versions": {}}}}

    found = merged([run(FLIP, FULL, kind=Kind.WRONG), run(FULL, CUT, kind=Kind.NEWEST)], (CUT, FULL))
    results = [from_json(result) for result in found["peers"]["dcp"]["results"]]
    assert found["faults"] == [CUT, FULL]
    assert cell([result for result in results if result.fault == FULL]) == "**wrong values** ×1; newest ×1"
    assert [result.fault for result in results] == [FULL, FULL, CUT]


def test_damage_is_what_it_says(tmp_path: Path) -> None:
    """One bit and no more; 4 KiB and no more."""
    path, content = tmp_path / "file", bytes(range(256)) * 64
    path.write_bytes(content)
    flip(path, random.Random(1))
    changed = [a ^ b for a, b in zip(content, path.read_bytes(), strict=True) if a != b]
    assert len(changed) == 1 and changed[0].bit_count() == 1
    cut(path)
    assert path.stat().st_size == len(content) - 4096


def test_what_libraries_print_is_no_event() -> None:
    """Only marked lines count."""
    assert heard("loading\n") is None
    assert heard('fault-lab: {"what": "begin", "step": 3}\n') == {"what": "begin", "step": 3}


def test_safetensors_loads_a_flipped_bit(tmp_path: Path) -> None:
    """With real files and new processes: wrong values and no error, which the judge finds."""
    plan = Plan(tmp_path, 2**20, runs=1, kills=1, seed=7, faults=(FLIP,))
    (result,) = Campaign(plan, PEERS["safetensors"], Path(sys.executable)).run()
    assert (result.fault, result.outcome) == (FLIP, Outcome(Kind.WRONG, 3))
