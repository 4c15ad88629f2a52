"""`python -m holdfast_service.offline export`: export a checkpoint's directory for another program.

It only reads there, so a daemon may serve its root.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast_formats.errors import CheckpointError, InvalidRequest, exit_status
from holdfast_formats.whereabouts import check_output_place
from holdfast_service.daemon.copying.foreign_export import ExportTerms
from holdfast_service.storage import PosixTier
from holdfast_service.wiring.exports import converted
from holdfast_service.wiring.progress import Quiet


def main(arguments: Sequence[str]) -> int:
    """Do it and print the report as JSON, or the problem; the exit status follows the error's branch."""
    given = _parser().parse_args(arguments)
    try:
        print(json.dumps(_exported(given)))
    except CheckpointError as error:
        print(json.dumps(error.problem()))
        return exit_status(error)
    return 0


def _exported(given: argparse.Namespace) -> dict[str, Any]:
    source, target = Path(given.checkpoint).resolve(), Path(given.target).absolute()
    if not source.is_dir():
        raise InvalidRequest(f"{given.checkpoint} is not a directory", hint="pass the directory of a checkpoint")
    check_output_place(target)
    terms = ExportTerms(given.kind, given.weights, given.dtype, given.layout, given.program)
    terms.check()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(f"cannot make {target.parent}: {error.strerror}", hint="choose another directory") from error
    done = converted(PosixTier(source), "", PosixTier(target.parent.resolve()), target.name, terms, Quiet())
    return {**done, "to": str(given.target)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="holdfast export", description="Export a checkpoint for another program.")
    parser.add_argument("checkpoint", metavar="DIR")
    parser.add_argument("target", metavar="DEST")
    parser.add_argument("--as", dest="kind", required=True, metavar="KIND")
    parser.add_argument("--weights", default="model", metavar="GROUP")
    for name in ("dtype", "layout", "program"):
        parser.add_argument(f"--{name}", metavar="TEXT")
    return parser
