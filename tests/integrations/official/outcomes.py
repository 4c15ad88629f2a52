"""How the tests of a run of pytest ended, out of the XML that it writes."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Literal, NamedTuple

Ended = Literal["passed", "failed", "skipped"]
_WORSE: dict[Ended, int] = {"skipped": 0, "passed": 1, "failed": 2}


class Outcome(NamedTuple):
    """How one test ended, and the first line that says why it did not pass."""

    ended: Ended
    why: str


def read(report: Path) -> dict[str, Outcome]:
    """Each test by its module, class and name: `test_checkpoint.TestClass.test_name[1]`. An error beside it is a failure."""
    outcomes: dict[str, Outcome] = {}
    for case in ET.parse(report).iter("testcase"):
        test = _name(case.get("classname") or "", case.get("name") or "")
        outcome = _outcome(case)
        before = outcomes.get(test)
        if before is None or _WORSE[outcome.ended] > _WORSE[before.ended]:
            outcomes[test] = outcome
    return outcomes


def summary(outcomes: dict[str, Outcome]) -> str:
    """How many passed, failed and were skipped."""
    count = Counter(outcome.ended for outcome in outcomes.values())
    return f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped"


def _name(place: str, test: str) -> str:
    """Without the folders that the test's file is in; a file that cannot be imported has its place for a name."""
    if not place:
        return test.rpartition(".")[2]
    parts = place.split(".")
    module = next((at for at, part in enumerate(parts) if part.startswith("test_") and part != "test_utils"), len(parts) - 1)
    return ".".join([*parts[module:], test])


def _outcome(case: ET.Element) -> Outcome:
    for child in case:
        if child.tag in ("failure", "error", "skipped"):
            lines = (child.get("message") or "").splitlines() or [""]
            return Outcome("skipped" if child.tag == "skipped" else "failed", lines[0][:200])
    return Outcome("passed", "")
