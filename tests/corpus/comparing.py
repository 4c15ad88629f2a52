"""Runs in the project's own environment: imports what a library has written, compares it, and exports it again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import holdfast
from holdfast_formats import naming
from tests.corpus.cases import NOTHING, Case, Digests, digests
from tests.kit.commands import call

STEP = 1
SHOWN = 4


class Result(NamedTuple):
    """What became of a case. `wrong` is empty if everything is as it has to be."""

    name: str
    library: str
    version: str
    tensors: int = 0
    kind: str = ""
    imported: str = ""
    exported: str = ""
    loaded: str = ""
    left_out: Mapping[str, str] = NOTHING
    refusal: Mapping[str, str] = NOTHING
    wrong: str = ""


def imported(case: Case, place: Path, root: Path) -> Result:
    """Import a case, and compare every tensor."""
    made = json.loads((place / "make.json").read_text())
    result = Result(case.name, case.library, made.get("version", "?"))
    if "error" in made:
        return result._replace(wrong=f"not made: {made['error']}")
    done = call("import", place / "source" / case.source, f"{case.name}@{STEP}", "--root", root, "--json", *case.words)
    said = json.loads(done.stdout)
    if done.exit_code != 0:
        refusal = {key: _without(str(said.get(key, "")), place) for key in ("detail", "hint")}
        unexpected = "" if case.read is None else f"refused: {refusal['detail']}"
        return result._replace(imported="refused", refusal=refusal, wrong=unexpected)
    result = result._replace(kind=said["source"]["kind"], tensors=said["tensors"])
    if case.read is None:
        return result._replace(wrong="imported, and is listed as refused")
    left_out, wrong = compared(case, made, stored(root / naming.checkpoint_path(case.name, STEP)))
    return result._replace(imported="FAILED" if wrong else "equal", left_out=left_out, wrong=wrong)


def stored(path: Path) -> Digests:
    """Every tensor of a checkpoint."""
    with holdfast.open(path) as checkpoint:
        return {
            f"{group}/{name}": one
            for group in checkpoint.groups
            for name, one in digests(
                {name: checkpoint.read(name, group=group, framework="torch") for name in checkpoint.tensors[group]}
            ).items()
        }


def compared(case: Case, made: dict[str, Any], found: Digests) -> tuple[dict[str, str], str]:
    """What is left out and why, and what is wrong: every tensor of both sides is accounted for."""
    wanted, left_out = made["tensors"], dict[str, str]()
    for name in wanted.keys() - found.keys():
        first = made["aliases"].get(name)
        twins = [
            one for one in (first, *(key for key, of in made["aliases"].items() if of == (first or name))) if one in found
        ]
        why = case.why_left_out(name) or (f"the same tensor as {twins[0]}" if twins else None)
        if why is not None:
            left_out[name] = why
    wrong = {
        "missing": wanted.keys() - found.keys() - left_out.keys(),
        "not in the source": found.keys() - wanted.keys(),
        "different": {name for name in wanted.keys() & found.keys() if wanted[name] != found[name]},
    }
    return left_out, "; ".join(f"{len(names)} {what}: {_some(names)}" for what, names in wrong.items() if names)


def exported(case: Case, result: Result, place: Path, root: Path) -> Result:
    """Export an imported case."""
    if case.load is None:
        return result
    done = call("export", f"{case.name}@{STEP}", place / "exported", "--root", root, "--json", *case.exported)
    if done.exit_code != 0:
        return result._replace(exported="refused", wrong=f"export refused: {json.loads(done.stdout).get('detail')}")
    return result._replace(exported=" ".join(case.exported) or "as it is")


def loaded(result: Result, place: Path) -> Result:
    """Compare what the library has made of the export with what it made of the source."""
    made, told = (json.loads((place / name).read_text()) for name in ("make.json", "load.json"))
    if "error" in told:
        return result._replace(loaded="FAILED", wrong=f"the export was not loaded: {told['error']}")
    one, other = made["loaded"], told["loaded"]
    differ = {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
    if differ or not one:
        return result._replace(loaded="FAILED", wrong=f"{len(differ)} differ after the export: {_some(differ)}")
    return result._replace(loaded=f"{len(one)} equal")


def _some(names: set[str]) -> str:
    return ", ".join(sorted(names)[:SHOWN]) + (" …" if len(names) > SHOWN else "")


def _without(text: str, place: Path) -> str:
    """A message, the same in every place."""
    return text.replace(f"{place}/", "").replace(str(place), "")
