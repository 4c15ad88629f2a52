"""Results as Markdown: a row a peer, a column a fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .campaign import CUT, DURING, FLIP, FULL, GONE, MISSING, RETURNED, STEPS, Result, from_json
from .judge import BADNESS, Kind, Outcome
from .peers import PEERS

TITLES = {
    DURING: "trainer killed during a save",
    RETURNED: "trainer killed when `save()` has returned",
    GONE: "everything killed when `save()` has returned",
    FLIP: "one bit turned round",
    CUT: "a file cut by 4 KiB",
    MISSING: "a file gone, each in turn",
    FULL: "disk full during a save",
}
LEGEND = """\
- **newest**: the new process has the newest save, right in every tensor. Where a save was killed, that is the save.
- **one before**: it has the save before, right in every tensor, without any help.
- **error**: loading raises. An earlier save loads when it is asked for by name. *Named*: the error says which file.
- **nothing loads**: loading raises, and no save is left that loads.
- **from zero**: no error and no checkpoint. Training would begin again.
- **wrong values**: no error, and tensors that were never saved like that.

The worst comes first, with how often it was seen."""


def label(outcome: Outcome) -> str:
    if outcome.kind is Kind.EARLIER:
        steps = STEPS[-1] - outcome.step
        return "one before" if steps == 1 else f"{steps} before"
    named = ", named" if outcome.named else ""
    return {
        Kind.NEWEST: "newest",
        Kind.REFUSED: f"error{named}",
        Kind.LOST: f"**nothing loads**{named}",
        Kind.NOTHING: "**from zero**",
        Kind.WRONG: "**wrong values**",
    }[outcome.kind]


def cell(results: Sequence[Result]) -> str:
    """Every kind of outcome with its number, the worst first, and what the trainer was told where it was asked."""
    counted = [result for result in results if not result.late]
    if not counted:
        return "–"
    ordered = sorted(counted, key=lambda result: -BADNESS.index(result.outcome.kind))
    numbers = Counter(label(result.outcome) for result in ordered)
    text = "; ".join(f"{name} ×{number}" for name, number in numbers.items())
    sees = Counter(told(result.sees) for result in ordered if result.sees)
    return text + "".join(f"; told: {name}" for name in sees)


def told(sees: str) -> str:
    """Where the trainer is told, and by which error; what that quotes is in the results."""
    where, colon, error = sees.partition(": ")
    return f"`{error.partition(':')[0]}` by {where}" if colon else sees


def markdown(found: Mapping[str, Any]) -> str:
    """The table of all peers, in the order in which they were put to the test."""
    faults = [fault for fault in TITLES if fault in found["faults"]]
    lines = [f"| | {' | '.join(TITLES[fault] for fault in faults)} |", "|---|" + "---|" * len(faults)]
    for name, peer in found["peers"].items():
        lines.append(f"| {PEERS[name].title} | {' | '.join(_row(peer, faults))} |")
    return "\n".join([*lines, "", LEGEND, "", _versions(found), ""])


def _row(peer: Mapping[str, Any], faults: Sequence[str]) -> list[str]:
    if "error" in peer:
        return [f"no result: {peer['error']}"[:300].replace("|", "/"), *[""] * (len(faults) - 1)]
    results = [from_json(result) for result in peer["results"]]
    return [
        peer["errors"].get(fault, "").replace("|", "/") or cell([one for one in results if one.fault == fault])
        for fault in faults
    ]


def _versions(found: Mapping[str, Any]) -> str:
    all_of = {name: number for peer in found["peers"].values() for name, number in peer.get("versions", {}).items()}
    return "Versions: " + ", ".join(f"{name} {number}" for name, number in all_of.items()) + "."
