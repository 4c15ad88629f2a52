"""Runs in a library's environment: `make PLACE` writes checkpoints and what the library reads from them, `load PLACE`
what it makes of their exports.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tests.corpus import shims  # noqa: F401 - before any library
from tests.corpus.cases import Case, aliases, digests, written
from tests.corpus.families import CASES


def made(case: Case, place: Path) -> dict[str, Any]:
    """Write one checkpoint; what the library reads from it."""
    source = place / "source"
    source.mkdir(parents=True)
    torch.manual_seed(7)
    case.make(source)
    found: dict[str, Any] = {"version": metadata.version(case.library)}
    if case.read is not None:
        tensors = case.read(source / case.source)
        found |= {"tensors": digests(tensors), "aliases": aliases(tensors)}
    if case.load is not None:
        found["loaded"] = digests(case.load(source / case.source))
    return found


def loaded(case: Case, place: Path) -> dict[str, Any]:
    """What the library makes of an export."""
    load = case.load_exported or case.load
    assert load is not None
    return {"loaded": digests(load(place / "exported"))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("act", choices=["make", "load"])
    parser.add_argument("place", type=Path)
    parser.add_argument("names", nargs="+")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    acts = {"make": made, "load": loaded}
    for name in chosen.names:
        try:
            told = acts[chosen.act](CASES[name], chosen.place / name)
        except Exception as error:
            traceback.print_exc()
            told = {"error": f"{type(error).__name__}: {error}"}
        written(chosen.place / name / f"{chosen.act}.json", told)
    sys.stdout.flush()
    os._exit(0)  # some libraries leave threads behind


if __name__ == "__main__":
    main()
