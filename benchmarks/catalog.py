"""How long a large catalog's lists take while saves go on, and a start on its root: `python -m benchmarks.catalog`.

A thousand runs of a hundred checkpoints each, with rounds and events, on SQLite and on PostgreSQL. The start is measured
with a catalog that is up to date, with every manifest read (as before stamps were looked at), and with no catalog at all.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import catalog_service
from benchmarks.catalog_rows import Size, at, fill, name
from holdfast_formats import naming
from holdfast_formats.disk import manifests
from holdfast_formats.rest import bodies
from holdfast_service.control.catalog import recovery
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.catalog.listing import Within
from holdfast_service.control.checkpoints import roots
from holdfast_service.control.database.database import Database
from holdfast_service.control.insight import run_figures
from holdfast_service.control.insight.run_orders import WantedRuns
from holdfast_service.control.insight.summary_queries import Summaries
from holdfast_service.storage import MemoryTier, PosixStore, PosixTier, stored_in
from holdfast_service.wiring import gc_tuning
from tests.control.published import a_manifest, mark_verified
from tests.databases import KINDS, running_postgres, why_not

BAR_MS = 50.0
SAVES_PER_S = 20
NEW = 10**6  # steps of the saves that go on


class Measured(NamedTuple):
    """Milliseconds of one query. `cpu` is what it cost of the processor here: on a busy machine, what is ours of `p99`."""

    name: str
    p50: float
    p99: float
    worst: float
    cpu: float


@contextmanager
def saves(catalog: Catalog, events: Events, size: Size) -> Iterator[list[float]]:
    """Saves go on, of runs at random, so many a second; the seconds that the catalog took for each."""
    stop, took = threading.Event(), []

    def save(number: int) -> None:
        run, step = name(random.randrange(size.runs)), NEW + number
        round_id = catalog.rounds.open(run, step, 1, 2, at(number))[0]
        for sealed in (1, 2):
            catalog.rounds.update(round_id, sealed=sealed)
        catalog.record_checkpoint(bodies.describe(a_manifest(run, step)))
        catalog.rounds.end(round_id, "committed", at(number))
        events.add("checkpoint-committed", "committed", run, step)
        mark_verified(catalog, run, step)
        run_figures.renew(catalog.database)  # as the thread that writes the catalog does

    def work() -> None:
        number = 0
        while not stop.wait(1 / SAVES_PER_S):
            began = time.perf_counter()
            save(number)
            took.append(time.perf_counter() - began)
            number += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield took
    finally:
        stop.set()
        thread.join()


def queries(catalog: Catalog, events: Events, size: Size) -> dict[str, Callable[[], object]]:
    """What lists and pages ask."""
    late, steps = at(size.checkpoints * size.runs / 10 * 0.95), range(0, size.checkpoints, 7)

    summaries = Summaries(stored_in(MemoryTier()).store, catalog)

    def run() -> str:
        return name(random.randrange(size.runs))

    def runs(cursor: str | None = None, limit: int = 100, prefix: str = "") -> object:
        return summaries.runs(summaries.names(cursor, limit, WantedRuns(prefix)).items)

    def checkpoints(state: str | None = None, **within: Any) -> object:
        return catalog.checkpoints(run(), None, 100, state, Within(**within))

    def run_page() -> None:
        of = run()
        catalog.run(of)
        catalog.checkpoints(of, None, 100)
        catalog.rounds.page(of, limit=100)
        events.newest(None, 50, of)

    return {
        "runs": runs,
        "runs, a late page": lambda: runs(cursor_of(size)),
        "runs, 1000 a page": lambda: runs(limit=1000),
        "runs ?prefix": lambda: runs(prefix=run()[:-1]),
        "run": lambda: catalog.run(run()),
        "checkpoints": checkpoints,
        "checkpoints ?label": lambda: checkpoints(steps=steps),
        "checkpoints ?state=verified": lambda: checkpoints("verified"),
        "checkpoints ?state=committed": lambda: checkpoints("committed"),
        "checkpoints ?state=damaged": lambda: checkpoints("damaged"),
        "checkpoints ?state=unhealthy": lambda: checkpoints("unhealthy"),
        "checkpoints ?step_min&step_max": lambda: checkpoints(step_min=10, step_max=60),
        "checkpoints ?since": lambda: checkpoints(since=late),
        "rounds": lambda: catalog.rounds.page(limit=100),
        "rounds ?run": lambda: catalog.rounds.page(run(), limit=100),
        "rounds ?state=committed": lambda: catalog.rounds.page(None, "committed", limit=100),
        "rounds ?state=aborted": lambda: catalog.rounds.page(None, "aborted", limit=100),
        "rounds ?run&state": lambda: catalog.rounds.page(run(), "aborted", limit=100),
        "rounds ?since": lambda: catalog.rounds.page(limit=100, within=Within(since=late)),
        "rounds ?since, none": lambda: catalog.rounds.page(limit=100, within=Within(since="2999-01-01")),
        "rounds ?step_min, none": lambda: catalog.rounds.page(limit=100, within=Within(step_min=NEW * 2)),
        "rounds by state and code": lambda: (catalog.rounds.counts(), catalog.rounds.failure_counts()),
        "events": lambda: events.newest(None, 100),
        "events ?run": lambda: events.newest(None, 100, run()),
        "a run's page": run_page,
    }


def cursor_of(size: Size) -> str | None:
    """The cursor behind the first nine tenths of the runs."""
    from holdfast_service.control.catalog.pages import page

    return page("summary-name", [name(size.runs * 9 // 10)] * 2, 1, str).next


def measure(ask: Callable[[], object], repeats: int) -> tuple[float, float, float, float]:
    """Milliseconds: median, 99th of a hundred, worst; and of the processor in this thread, 99th of a hundred."""
    ask()
    took, busy = [], []
    for _ in range(repeats):
        began, worked = time.perf_counter(), time.thread_time()
        ask()
        took.append((time.perf_counter() - began) * 1000)
        busy.append((time.thread_time() - worked) * 1000)
    took.sort()
    last = min(int(repeats * 0.99), repeats - 1)
    return statistics.median(took), took[last], took[-1], sorted(busy)[last]


def bench_lists(url: str, size: Size) -> dict[str, Any]:
    database = Database.open(url)
    began = time.perf_counter()
    fill(database, size)
    filled_s = time.perf_counter() - began
    catalog, events = Catalog(database), Events(database, "node", lambda: at(0))
    while run_figures.renew(database):
        pass
    gc_tuning.settle()  # as the daemon does before it serves
    with saves(catalog, events, size) as took:
        asked = queries(catalog, events, size).items()
        found = [Measured(what, *measure(ask, size.repeats)) for what, ask in asked]
    declared = measure(lambda: catalog.declare_attempt(name(0), f"launch-{random.random()}", 1, at(0)), 50)
    checked = time.perf_counter()
    database.close()
    recovery.open_sound(url).close()
    return {
        "filled_s": filled_s,
        "saves": len(took),
        "save_ms": statistics.median(took) * 1000 if took else None,
        "declare_attempt_ms": declared,
        "open_sound_s": time.perf_counter() - checked,
        "lists": [one._asdict() for one in found],
    }


@contextmanager
def a_root(size: Size) -> Iterator[Path]:
    """A directory with all the checkpoints, tiny ones."""
    with tempfile.TemporaryDirectory(prefix="holdfast-start-") as directory:
        for run in range(size.runs):
            for step in range(size.checkpoints):
                put(Path(directory), name(run), step)
        yield Path(directory)


def bench_start(root: Path, url: str, size: Size) -> dict[str, float]:
    """Seconds of the reconciliation at a start."""
    tier, catalog, took = PosixTier(root), Catalog.open(url), {}
    for what, thorough in (("no catalog", False), ("every manifest read", True), ("nothing changed", False)):
        began = time.perf_counter()
        problems = roots.reconcile(PosixStore(tier), catalog, thorough)
        took[what] = time.perf_counter() - began
        assert not problems
    assert all(catalog.run(name(run)).checkpoints == size.checkpoints for run in range(size.runs))
    catalog.close()
    return took


def put(root: Path, run: str, step: int) -> None:
    made = a_manifest(run, step)
    encoded = manifests.encode(made)
    directory = root / naming.checkpoint_path(run, step)
    directory.mkdir(parents=True)
    for file, data in (
        (naming.STATE, b"{}"),
        (naming.MANIFEST, encoded),
        (naming.COMMIT, manifests.encode_commit(made, encoded)),
    ):
        (directory / file).write_bytes(data)


def main() -> None:
    """Measure, and print tables; the numbers go to --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--checkpoints", type=int, default=100, help="of each run")
    parser.add_argument("--repeats", type=int, default=200, help="of each query")
    parser.add_argument("--only", choices=("lists", "service", "start"))
    parser.add_argument("--kind", choices=KINDS, help="of database; both unless given")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    size = Size(options.runs, options.checkpoints, options.repeats)
    results: dict[str, Any] = {"size": size._asdict(), "sqlite": {}, "postgresql": {}}
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-catalog-"))
        new: dict[str, Callable[[str], str]] = {"sqlite": lambda what: f"sqlite:///{directory}/{what}.sqlite"}
        if options.kind != "sqlite" and (reason := why_not()):
            print(f"no PostgreSQL: {reason}")
        elif options.kind != "sqlite":
            server = stack.enter_context(running_postgres())
            new["postgresql"] = lambda _: server.make()
        chosen = {kind: make for kind, make in new.items() if options.kind in (None, kind)}
        for kind, make in chosen.items():
            if options.only in (None, "lists"):
                results[kind] |= bench_lists(make("lists"), size)
            if options.only in (None, "service"):
                url = None if kind == "sqlite" else make("service")
                results[kind]["service"] = catalog_service.bench_service(url, size)
        if options.only in (None, "start"):
            root = stack.enter_context(a_root(size))
            for kind, make in chosen.items():
                results[kind]["start_s"] = bench_start(root, make("start"), size)
    show(results)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


def show(results: dict[str, Any]) -> None:
    for kind in ("sqlite", "postgresql"):
        found = results.get(kind)
        if not found:
            continue
        print(f"\n{kind}: {results['size']['runs']} runs × {results['size']['checkpoints']} checkpoints")
        for one in found.get("lists", ()):
            over = "" if one["p99"] < BAR_MS else f"   over {BAR_MS:.0f} ms"
            wall = f"{one['p50']:8.2f} ms{one['p99']:9.2f} ms p99{one['worst']:9.2f} ms worst"
            print(f"  {one['name']:34}{wall}{one['cpu']:9.2f} ms cpu p99{over}")
        if "saves" in found:
            print(f"  saves meanwhile: {found['saves']}, {found['save_ms']:.2f} ms of the catalog each")
            p50, p99, *_ = found["declare_attempt_ms"]
            print(f"  an attempt declared: {p50:.2f} ms, p99 {p99:.2f} ms")
            print(f"  opened and looked through: {found['open_sound_s']:.2f} s")
        if "service" in found:
            catalog_service.show(found["service"], BAR_MS)
        for what, seconds in found.get("start_s", {}).items():
            print(f"  a start, {what}: {seconds:.2f} s")


if __name__ == "__main__":
    main()
