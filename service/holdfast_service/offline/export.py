"""`python -m holdfast_service.offline export|convert`: a directory for another program, from a Holdfast or foreign
checkpoint.

Both only read the source, so a daemon may serve its root. After a kill, finished files are reused; after Ctrl-C or a
failure, nothing is left.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast_formats.errors import CheckpointError, InvalidRequest, exit_status
from holdfast_formats.foreign import sixteen_bits
from holdfast_formats.foreign.kinds import ReadOptions
from holdfast_formats.whereabouts import check_local, check_output_place
from holdfast_service.daemon.copying import converting, exporting
from holdfast_service.daemon.copying.foreign_export import ExportTerms
from holdfast_service.storage import PosixTier
from holdfast_service.wiring import exports
from holdfast_service.wiring.exports import ExportWork
from holdfast_service.wiring.progress import Printed, Progress, Quiet
from holdfast_service.wiring.transfers import check_directory, open_source


def main(arguments: Sequence[str]) -> int:
    """Run it and print the report as JSON, or the problem; the exit status follows the error's branch."""
    given = _parser().parse_args(arguments)
    try:
        print(json.dumps(_exported(given) if given.act == "export" else _converted(given)))
    except CheckpointError as error:
        print(json.dumps(error.problem()))
        return exit_status(error)
    return 0


def _exported(given: argparse.Namespace) -> dict[str, Any]:
    source, target = _ends(given)
    terms = _terms(given)
    work = ExportWork(_place(target), target.name, _progress(given))
    done = exports.converted(PosixTier(source), "", terms, work)
    return {**done, "to": str(given.target)}


def _converted(given: argparse.Namespace) -> dict[str, Any]:
    source, target = _ends(given)
    terms = _terms(given)
    options = ReadOptions(given.as_is, given.assemble_flat, given.int16, given.shards)
    conversion = converting.plan_conversion(open_source(source), given.source_kind, options, terms)
    if given.dry_run:
        if target.exists() or target.is_symlink():
            raise exporting.taken(given.target)
        return {**converting.report(conversion), "to": str(given.target), "dry_run": True}
    done = exports.convert(conversion, ExportWork(_place(target), target.name, _progress(given)))
    return {**done, "to": str(given.target)}


def _ends(given: argparse.Namespace) -> tuple[Path, Path]:
    """The source, which is a directory, and the target, which is not inside of it."""
    check_local(given.target)
    check_directory(Path(given.source))
    source, target = Path(given.source).resolve(), Path(given.target).absolute()
    if target.resolve().is_relative_to(source):
        raise InvalidRequest(f"{given.target} is inside of the checkpoint", hint="choose another directory")
    exporting.check_name(target.name)
    check_output_place(target)
    return source, target


def _terms(given: argparse.Namespace) -> ExportTerms:
    terms = ExportTerms(given.kind, given.weights, given.dtype, given.layout, given.program)
    terms.check()
    return terms


def _place(target: Path) -> PosixTier:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(f"cannot make {target.parent}: {error.strerror}", hint="choose another directory") from error
    return PosixTier(target.parent.resolve())


def _progress(given: argparse.Namespace) -> Progress:
    return Printed(sys.stdout) if given.progress else Quiet()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="holdfast", description="Write a directory for another program.")
    acts = parser.add_subparsers(dest="act", required=True)
    export = acts.add_parser("export", help="from the directory of a checkpoint")
    convert = acts.add_parser("convert", help="from the directory of another program's checkpoint")
    for act, metavar in ((export, "DIR"), (convert, "SRC")):
        act.add_argument("source", metavar=metavar)
        act.add_argument("target", metavar="DEST")
        act.add_argument("--as", dest="kind", required=True, metavar="KIND")
        act.add_argument("--weights", default="model", metavar="GROUP")
        for name in ("dtype", "layout", "program"):
            act.add_argument(f"--{name}", metavar="TEXT")
        act.add_argument("--progress", action="store_true", help="print lines of [done, total] bytes first")
    convert.add_argument("--from", dest="source_kind", metavar="KIND", help="what the directory is, where that is not plain")
    convert.add_argument("--as-is", action="store_true", help="keep names and layouts as they are")
    convert.add_argument("--assemble-flat", action="store_true", help="put flat directories of Paddle together")
    convert.add_argument("--int16", choices=sixteen_bits.WAYS, help="what 16-bit integers are")
    convert.add_argument("--shards", type=int, metavar="N", help="how many ranks wrote shards")
    convert.add_argument("--dry-run", action="store_true", help="only say what would be made")
    return parser
