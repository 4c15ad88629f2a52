"""The same faults, done to Holdfast and to its peers; what a new process gets of each.

python -m benchmarks.faults
python -m benchmarks.faults --only holdfast,orbax --out DIRECTORY
python -m benchmarks.faults --show FIRST/results.json SECOND/results.json --out DIRECTORY
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from . import environments, harness
from .fault_lab.campaign import FAULTS, Campaign, Plan, as_json
from .fault_lab.peers import PADDLE, PEERS, Spec
from .fault_lab.table import label, markdown

HOME = harness.TOP / ".bench"
STATE_BYTES = 128 * 2**20
RUNS, KILLS = 3, 10


def main() -> int:
    given = _parser().parse_args()
    out = given.out or HOME / "faults" / time.strftime("%Y%m%d-%H%M%S")
    out.mkdir(parents=True, exist_ok=True)
    found = merged([json.loads(path.read_text()) for path in given.show], given.faults) if given.show else _run(given, out)
    (out / "results.json").write_text(json.dumps(found, indent=1))
    (out / "faults.md").write_text(markdown(found))
    print(markdown(found))
    print(f"faults: {out}: results.json and faults.md")
    return 0


def _run(given: argparse.Namespace, out: Path) -> dict[str, Any]:
    seed = given.seed if given.seed is not None else secrets.randbelow(2**31)
    print(f"faults: seed {seed}", flush=True)
    plan = Plan(given.directory.absolute(), given.state_bytes, given.runs, given.kills, seed, given.faults)
    found: dict[str, Any] = {"seed": seed, "state_bytes": plan.state_bytes, "faults": plan.faults, "peers": {}}
    for name in given.only or [name for name in PEERS if name not in PADDLE]:
        for peer in _put_to_the_test(plan, PEERS[name]):
            found["peers"][name] = peer
            (out / "results.json").write_text(json.dumps(found, indent=1))  # nothing is lost when it is interrupted
    return found


def _put_to_the_test(plan: Plan, spec: Spec) -> Iterator[dict[str, Any]]:
    """What is known of a peer, after every fault anew."""
    prepared = environments.Prepared(Path(sys.executable))
    if spec.environment:
        prepared = environments.environment(HOME / spec.environment, spec.requires)
    if prepared.python is None:
        yield {"error": prepared.reason}
        return
    campaign = Campaign(plan, spec, prepared.python)
    results: list[dict[str, Any]] = []
    began = time.monotonic()
    try:
        for result in campaign.run():
            results.append(as_json(result))
            late = " (late)" if result.late else ""
            more = " | ".join(text for text in (result.what, result.sees, result.outcome.error) if text)
            at = f"{time.monotonic() - began:.0f} s"
            print(f"faults: {spec.name}, {result.fault}: {label(result.outcome)}{late} ({at}) {more[:300]}", flush=True)
            yield {"results": results, "errors": campaign.errors, "versions": campaign.versions}
    except harness.Failed as failure:
        print(f"faults: {spec.name}: {failure}\n{failure.log}", flush=True)
        yield {"error": str(failure), "log": failure.log, "versions": campaign.versions}
        return
    yield {"results": results, "errors": campaign.errors, "versions": campaign.versions}


def merged(parts: list[dict[str, Any]], faults: Collection[str] = FAULTS) -> dict[str, Any]:
    """Several runs as one: of these faults, what every one of them has found."""
    peers: dict[str, Any] = {}
    for part in parts:
        for name, peer in part["peers"].items():
            if "error" in peer:
                peers.setdefault(name, peer)
                continue
            before = peers.get(name, {})
            results = [result for result in peer["results"] if result["fault"] in faults]
            errors = {fault: error for fault, error in peer["errors"].items() if fault in faults}
            peers[name] = peer | {
                "results": before.get("results", []) + results,
                "errors": before.get("errors", {}) | errors,
            }
    done = [fault for fault in faults if any(fault in part["faults"] for part in parts)]
    return dict(parts[0]) | {"faults": done, "peers": {name: peers[name] for name in PEERS if name in peers}}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="faults", description="What a fault does to Holdfast and to its peers.")
    parser.add_argument("--only", type=_names(PEERS), metavar="PEER,PEER", help=f"of {', '.join(PEERS)}")
    parser.add_argument(
        "--faults", type=_names(FAULTS), default=FAULTS, metavar="FAULT,FAULT", help=f"of {', '.join(FAULTS)}"
    )
    parser.add_argument("--runs", type=int, default=RUNS, help="of each fault")
    parser.add_argument("--kills", type=int, default=KILLS, help="points of a save at which a trainer is killed")
    parser.add_argument("--state-bytes", type=int, default=STATE_BYTES)
    parser.add_argument("--seed", type=int, help="of the data and of what is damaged; a new one is printed otherwise")
    parser.add_argument("--directory", type=Path, default=HOME / "fault-lab", help="where checkpoints are written")
    parser.add_argument("--out", type=Path, help="where results go; .bench/faults/<time> otherwise")
    parser.add_argument("--show", type=Path, nargs="+", metavar="RESULTS.json", help="show what was run before, as one run")
    return parser


def _names(known: Any) -> Any:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}")
        return names

    return parse


if __name__ == "__main__":
    sys.exit(main())
