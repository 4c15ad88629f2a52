"""`make corpus`: make each case in its library's environment, import, compare, export, and load it there; prints a table.

Arguments are names of cases, or beginnings of names; without any, all cases are run. What is refused must be refused in the
words of `refusals.json`, which `--record` writes; docs/foreign-checkpoints.md lists the same.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib  # noqa: TID251
else:
    import tomli as tomllib

from tests.corpus import comparing, document
from tests.corpus.cases import Case, written
from tests.corpus.comparing import Result
from tests.corpus.families import CASES
from tests.integrations.__main__ import TABLE, make
from tests.integrations.environments import BUILT, TOP

PLACE = BUILT.parent / "corpus"
OWN = Path(__file__).with_name("environments.toml")


def environments() -> dict[str, dict[str, object]]:
    """All that cases may name."""
    return {**tomllib.loads(TABLE.read_text()), **tomllib.loads(OWN.read_text())}


def _in_library(python: Path, act: str, cases: Iterable[Case]) -> None:
    names = [case.name for case in cases]
    path = os.pathsep.join([str(TOP), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (PLACE / f"{act}.log").open("a") as log:
        command = [str(python), "-W", "ignore", "-m", "tests.corpus.making", act, str(PLACE), *names]
        subprocess.run(command, cwd=TOP, env=os.environ | {"PYTHONPATH": path}, check=True, stdout=log, stderr=log)


def run(environment: str, cases: list[Case], root: Path) -> list[Result]:
    """All cases of one environment."""
    print(f"== {environment}: {len(cases)} cases", flush=True)
    for case in cases:
        shutil.rmtree(PLACE / case.name, ignore_errors=True)
    python = make(environment, environments()[environment])
    _in_library(python, "make", cases)
    results = {}
    for case in cases:
        result = comparing.imported(case, PLACE / case.name, root)
        if result.imported == "equal":
            result = comparing.exported(case, result, PLACE / case.name, root)
        results[case.name] = result
    again = [case for case in cases if results[case.name].exported and not results[case.name].wrong]
    if again:
        _in_library(python, "load", again)
    for case in again:
        results[case.name] = comparing.loaded(results[case.name], PLACE / case.name)
    return list(results.values())


def table(results: list[Result]) -> str:
    """All results, for people."""
    lines = [("case", "library", "version", "kind", "tensors", "left out", "imported", "exported", "loaded")]
    for one in results:
        counts = (str(one.tensors), str(len(one.left_out)))
        lines.append((one.name, one.library, one.version, one.kind, *counts, one.imported, one.exported, one.loaded))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def main() -> int:
    """The exit status: 0 if every case is as it has to be."""
    parser = argparse.ArgumentParser(prog="python -m tests.corpus")
    parser.add_argument("names", nargs="*", help="beginnings of the names of cases (default: all)")
    parser.add_argument("--record", action="store_true", help="write what is refused now to refusals.json and the documents")
    chosen = parser.parse_args()
    cases = [case for case in CASES.values() if not chosen.names or case.name.startswith(tuple(chosen.names))]
    if not cases:
        parser.error("no case has such a name")
    os.environ["HOLDFAST_URL"] = ""  # of no service
    root = PLACE / "root"
    shutil.rmtree(root, ignore_errors=True)
    PLACE.mkdir(parents=True, exist_ok=True)
    for act in ("make", "load"):
        (PLACE / f"{act}.log").unlink(missing_ok=True)
    ordered = sorted(cases, key=lambda case: case.environment)
    results = [
        result
        for environment, some in groupby(ordered, key=lambda case: case.environment)
        for result in run(environment, list(some), root)
    ]
    if chosen.record:
        document.record(results)
    results = [document.as_recorded(result) for result in results]
    written(PLACE / "results.json", [one._asdict() for one in results])
    print(table(results))
    wrong = [one for one in results if one.wrong]
    for one in wrong:
        print(f"WRONG {one.name}: {one.wrong}")
    libraries = {one.library for one in results}
    print(f"{len(results) - len(wrong)} of {len(results)} checkpoints of {len(libraries)} libraries are as they have to be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
