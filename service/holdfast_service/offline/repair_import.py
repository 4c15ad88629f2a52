"""`python -m holdfast_service.offline repair|import|merge`: repairs, imports and merges in a root that no daemon serves."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from holdfast_formats import naming
from holdfast_formats.errors import AlreadyCommitted, CheckpointError, InvalidRequest, exit_status
from holdfast_formats.foreign import sixteen_bits
from holdfast_formats.whereabouts import check_local, check_root_place
from holdfast_service.config import default_node
from holdfast_service.control.access import audit
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.checkpoints import roots
from holdfast_service.control.opening import Control, open_control
from holdfast_service.daemon.copying.importing import ImportOptions
from holdfast_service.daemon.copying.repair import Repairer
from holdfast_service.storage import PosixStore, PosixTier, Tier, lock_root
from holdfast_service.wiring.imports import WantedImport, foretold
from holdfast_service.wiring.progress import Printed, Quiet
from holdfast_service.wiring.transfers import Transfers, open_source

_DONE = {"repair": "repaired", "import": "imported", "merge": "merged"}


class Which(NamedTuple):
    run: str
    step: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it and print the result as JSON, or the problem; the exit status follows the error's branch."""
    given = _parser().parse_args(arguments)
    try:
        print(json.dumps(_done(given)))
    except CheckpointError as error:
        print(json.dumps(error.problem()))
        return exit_status(error)
    return 0


def _done(given: argparse.Namespace) -> dict[str, Any]:
    run, at, step = given.checkpoint.partition("@")
    if not at or not (step.isascii() and step.isdigit()):
        raise InvalidRequest(f"{given.checkpoint!r} does not name a checkpoint", hint="give RUN@STEP")
    which = Which(naming.check_run(run), naming.check_step(int(step)))
    check_local(given.root)
    root = Path(given.root).resolve()
    if given.act == "repair" and not root.is_dir():
        raise InvalidRequest(f"the directory {root} does not exist", hint="pass the daemon's directory as --root")
    if given.act == "import" and given.dry_run:
        return _foretold(given, WantedImport(*which, _options(given), dry_run=True), root)
    others = {str(path): _root_of(Path(path)) for path in (given.sources or ())}
    with _decided(root, listed=given.act != "repair") as (tier, control, catalog):
        repairer = Repairer(tier, control, control.repairs, lambda: others)
        transfers = Transfers(tier, control, repairer)
        made = _act(given, transfers, which)
        if not (given.act == "merge" and given.dry_run):
            audit.offline(catalog.database, default_node(), f"checkpoint-{_DONE[given.act]}", *which)
        return made


def _act(given: argparse.Namespace, transfers: Transfers, which: Which) -> dict[str, Any]:
    if given.act == "repair":
        return transfers.repair(*which)
    progress = Printed(sys.stdout) if given.progress else Quiet()
    if given.act == "merge":
        wanted = WantedImport(*which, dry_run=given.dry_run, again=True)
        return transfers.merge(given.recipe, wanted, lambda path: open_source(Path(path)), progress)
    return transfers.bring(open_source(Path(given.source)), WantedImport(*which, _options(given)), progress)


def _options(given: argparse.Namespace) -> ImportOptions:
    return ImportOptions(given.kind, given.program, given.as_is, given.assemble_flat, given.int16, given.shards)


def _foretold(given: argparse.Namespace, wanted: WantedImport, root: Path) -> dict[str, Any]:
    """A dry run of an import. Nothing is made, not even the root, and a daemon may be serving it."""
    check_root_place(root)
    there = PosixTier(root).list(naming.checkpoint_path(wanted.run, wanted.step)) if root.is_dir() else []
    if there:
        raise AlreadyCommitted(f"{given.checkpoint} is already committed", hint="remove it, or choose another step")
    return foretold(open_source(Path(given.source)), wanted)


@contextmanager
def _decided(root: Path, listed: bool) -> Iterator[tuple[Tier, Control, Catalog]]:
    """The root's tier, control and catalog, under an exclusive lock: `RootBusy` while a daemon serves it.

    With `listed` the catalog is first reconciled with the directories, which would unlist damaged checkpoints.
    """
    lock = lock_root(root)
    try:
        tier = PosixTier(root)
        catalog = Catalog.open(f"sqlite:///{root / naming.CATALOG}")
        try:
            if listed:
                roots.reconcile(PosixStore(tier), catalog)
            control = open_control(tier, catalog, None)
            yield tier, control, catalog
            control.close()
        finally:
            catalog.close()
    finally:
        lock.release()


def _root_of(path: Path) -> Tier:
    """The root that a replica, or a single checkpoint's directory in one, belongs to."""
    if not path.is_dir():
        raise InvalidRequest(f"the directory {path} does not exist", hint="pass a replica's directory")
    found = path.resolve()
    if (found / naming.COMMIT).exists() or (found / naming.MANIFEST).exists():
        if found.parent.name != naming.CHECKPOINTS:
            raise InvalidRequest(f"{path} is not inside a root", hint="pass the directory that contains RUN/checkpoints/")
        found = found.parents[2]
    return PosixTier(found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="holdfast", description="Work in a root that no daemon serves.")
    acts = parser.add_subparsers(dest="act", required=True)
    repair = acts.add_parser("repair", help="mend a damaged checkpoint from replicas")
    repair.add_argument("checkpoint", metavar="RUN@STEP")
    repair.add_argument("--from", dest="sources", action="append", metavar="DIR", help="a replica's directory")
    bring = acts.add_parser("import", help="make a checkpoint of a directory")
    bring.add_argument("source", metavar="SRC")
    bring.add_argument("checkpoint", metavar="RUN@STEP")
    bring.add_argument("--from", dest="kind", metavar="KIND", help="what the directory is, where that is not plain")
    bring.add_argument("--program", metavar="TEXT", help="a mapping program: its name, or its text")
    bring.add_argument("--as-is", action="store_true", help="keep names and layouts as they are")
    bring.add_argument("--assemble-flat", action="store_true", help="put flat directories of Paddle together")
    bring.add_argument("--int16", choices=sixteen_bits.WAYS, help="what 16-bit integers are")
    bring.add_argument("--shards", type=int, metavar="N", help="how many ranks wrote shards")
    bring.add_argument("--dry-run", action="store_true", help="only say what would be made")
    merge = acts.add_parser("merge", help="merge checkpoints by a recipe")
    merge.add_argument("checkpoint", metavar="RUN@STEP")
    merge.add_argument("--recipe", required=True, metavar="TEXT", help="the text of a recipe")
    merge.add_argument("--dry-run", action="store_true", help="only say what would be made")
    for act in (bring, merge):
        act.add_argument("--progress", action="store_true", help="print lines of [done, total] bytes first")
    bring.set_defaults(sources=())
    merge.set_defaults(sources=())
    for act in (repair, bring, merge):
        act.add_argument("--root", required=True, metavar="DIR")
    return parser
