"""The command behind `make bench`: run, or show results that were run before.

python -m benchmarks --quick
python -m benchmarks --ranks 1 --runs 7
python -m benchmarks --show .bench/results/A/results.json .bench/results/B/results.json
"""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from . import environments, harness, report
from .peers import PEERS
from .state import FULL_BYTES
from .training import PRODUCTS

HOME = harness.TOP / ".bench"
QUICK_BYTES, QUICK_RUNS = 32 * 2**20, 3


def main() -> int:
    given = _parser().parse_args()
    if given.show:
        found = report.merged([json.loads(path.read_text()) for path in given.show])
        folder = given.out or given.show[0].parent
        folder.mkdir(parents=True, exist_ok=True)
    else:
        folder = given.out or HOME / "results" / time.strftime("%Y%m%d-%H%M%S")
        found = _run(given, folder)
    report.show(found)
    (folder / "results.md").write_text(report.markdown(found))
    _plot(found, folder)
    print(f"bench: {folder}: results.json, results.md and the plots")
    return 1 if any(record.get("wrong") for record in found["records"]) else 0


def _run(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    seed = given.seed if given.seed is not None else secrets.randbelow(2**31)
    print(f"bench: seed {seed}", flush=True)
    options = harness.Options(
        peers=given.only or tuple(PEERS),
        ranks=given.ranks,
        runs=given.runs or (QUICK_RUNS if given.quick else 7),
        state_bytes=given.state_bytes or (QUICK_BYTES if given.quick else FULL_BYTES),
        tensors=given.tensors,
        measures=given.measure,
        warm=given.warm,
        check_all=given.quick or given.check_all,
        seed=seed,
        start=given.start,
        products=given.products,
        directory=given.directory.absolute(),
    )
    prepared = environments.prepare([PEERS[name] for name in options.peers], HOME)
    return harness.run(options, prepared, folder / "results.json")


def _plot(found: dict[str, Any], folder: Path) -> None:
    prepared = environments.environment(HOME / environments.PLOTS, environments.PLOTS_REQUIRE)
    if prepared.python is None:
        print(f"bench: no plots: {prepared.reason}")
        return
    source = folder / "plotted.json"
    source.write_text(json.dumps(found))
    command = [str(prepared.python), "-m", "benchmarks.plots", str(source), str(folder)]
    try:
        subprocess.run(command, cwd=harness.TOP, check=True)
    finally:
        source.unlink()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make bench", description="Holdfast and its peers, side by side.")
    parser.add_argument(
        "--quick", action="store_true", help="32 MiB and 3 runs, every save checked: to try it, not to quote it"
    )
    parser.add_argument("--only", type=_peers, metavar="PEER,PEER", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--ranks", type=_numbers, default=(1, 2), metavar="1,2")
    parser.add_argument("--runs", type=int, help="rounds; 7 unless --quick")
    parser.add_argument(
        "--start", type=int, default=0, help="rounds that an earlier command has run, when a run is cut into several"
    )
    parser.add_argument("--warm", type=int, default=2, help="warm saves in a case, beside the one under training")
    parser.add_argument(
        "--products", type=int, default=PRODUCTS, help="of matrices in a step of training: 2 take about 50 ms on one core"
    )
    parser.add_argument("--state-bytes", type=int, help="about so many a rank; 2.03 GiB unless --quick")
    parser.add_argument("--tensors", type=int, default=0, help="so many small tensors instead of 300 of a Llama")
    parser.add_argument("--measure", type=_measures, default=("save", "load"), metavar="save,load")
    parser.add_argument(
        "--check-all", action="store_true", help="load and check after every save, not one kind of them a round"
    )
    parser.add_argument("--seed", type=int, help="of the order and the data; a new one is printed otherwise")
    parser.add_argument("--directory", type=Path, default=HOME / "data", help="on the disk to be measured")
    parser.add_argument("--out", type=Path, help="where results go; .bench/results/<time> otherwise")
    parser.add_argument("--show", type=Path, nargs="+", metavar="RESULTS.json", help="show what was run before, as one run")
    return parser


def _peers(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no peer is called {', '.join(unknown)}")
    return names


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) for part in text.split(","))
    if not set(numbers) <= {1, 2}:
        raise argparse.ArgumentTypeError("1 and 2 ranks can be measured")
    return numbers


def _measures(text: str) -> tuple[str, ...]:
    if not set(text.split(",")) <= {"save", "load"}:
        raise argparse.ArgumentTypeError("save, load, or both")
    return tuple(text.split(","))


if __name__ == "__main__":
    sys.exit(main())
