"""The story of several nodes: a run to compare with, a run that loses a node, its resumption."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape

from holdfast.demo import report
from holdfast.demo.config import LAUNCH_S_MAX
from holdfast.demo.precision import ProductTimes, measure_products
from holdfast.demo.processes import POLL_S, DemoFailed, LaunchedJob, leaving_in_order
from holdfast.demo.progress import RunProgress
from holdfast.demo.proof import Claim, LaunchRecord, compare_losses, compare_states, parse_journal
from holdfast.rest.api import Api
from holdfast.terminal import node_table
from holdfast_formats.rest.bodies import Node

from .database import catalog_server
from .machines import Machine, RanksOn, launched, machines

UNINTERRUPTED, RESUMED = "nodes-uninterrupted", "nodes"
NODES, NODES_MIN, STEPS, STEPS_MIN = 3, 2, 36, 12
NOTICE_S_MAX = 120.0  # the ranks that are left notice that one is gone, and end
LOST_S_MAX = 90.0  # the lost node's lease ends, and others take its duties over


class ClusterStage(NamedTuple):
    """The demo's directory, machines, length and console."""

    directory: Path
    machines: list[Machine]
    steps: int
    console: Console
    products: ProductTimes

    @property
    def save_every(self) -> int:
        return max(self.steps // 6, 2)

    @property
    def ranks(self) -> int:
        return len(self.machines)

    def place(self, run: str) -> Path:
        """Where a run's ranks write their journals, digests and log."""
        return self.directory / run


class Loss(NamedTuple):
    """The second run's lost node, its duties, the ranks' progress, and the number of killed processes."""

    machine: Machine
    duties: tuple[str, ...]
    step: int
    staged: int
    processes: int


def main(directory: Path, nodes: int = NODES, steps: int = STEPS, catalog: str | None = None) -> int:
    """Play the demo in a fresh directory below `directory`; 0 when everything claimed was shown, else 1."""
    console = Console(highlight=False)
    if nodes < NODES_MIN or steps < STEPS_MIN:
        console.print(f"[red]This demo needs at least {NODES_MIN} nodes and {STEPS_MIN} steps.[/red]")
        return 2
    proven = False
    try:
        with leaving_in_order(), cluster(directory.resolve(), nodes, steps, catalog, console) as made:
            proven, left = play(made)
            if proven and console.is_terminal:
                _stay(console, left)
    except DemoFailed as failure:
        console.print(f"[red bold]The demo failed:[/red bold] {escape(str(failure))}")
        report.print_log(console, failure.log)
    return 0 if proven else 1


@contextmanager
def cluster(directory: Path, nodes: int, steps: int, catalog: str | None, console: Console) -> Iterator[ClusterStage]:
    """The machines of a new demo, with a database of their own if none is given. All of it ends with the block."""
    place = _fresh(directory)
    with ExitStack() as stack:
        console.print("[bold]1[/bold]  A database, and a daemon on each node, all of them on one directory")
        url = catalog or stack.enter_context(catalog_server(place / "postgres.log"))
        made = stack.enter_context(machines(nodes, place, url))
        for machine in made:
            console.print(f"   {machine.name}: process {machine.daemon.pid}, {machine.url}", soft_wrap=True)
        watch = f"holdfast open --url {made[-1].url}"
        console.print(f"   checkpoints in {place / 'data'}; watch the page Nodes:  {watch}", soft_wrap=True)
        yield ClusterStage(place, made, steps, console, measure_products())


def play(cluster: ClusterStage) -> tuple[bool, list[Machine]]:
    """Train, train and lose a node, resume; print the claims. Returns whether all hold, and the remaining nodes."""
    say, began = partial(cluster.console.print, soft_wrap=True), time.monotonic()
    say(f"[bold]2[/bold]  {cluster.steps} steps, a rank on each node, without a loss; a save every {cluster.save_every}")
    finish(cluster, UNINTERRUPTED, [RanksOn(machine, 1) for machine in cluster.machines])
    say("[bold]3[/bold]  The same run again, to lose a node")
    lost = train_and_lose(cluster)
    name = lost.machine.name
    say(f"   SIGKILL to the daemon and the ranks of {name}, {lost.processes} processes, at step {lost.step}")
    left = [machine for machine in cluster.machines if machine is not lost.machine]
    seen = wait_until_lost(cluster, lost, left[0])
    say(f"   {name} is lost; others have taken over its duties")
    cluster.console.print(node_table.render(list(seen.values())))
    say(f"[bold]4[/bold]  The same command on {len(left)} nodes, {cluster.ranks} ranks; {left[0].name} has two of them")
    finish(cluster, RESUMED, [RanksOn(left[0], 2), *(RanksOn(machine, 1) for machine in left[1:])])
    whole, resumed = journals(cluster, UNINTERRUPTED), journals(cluster, RESUMED)
    say(f"   resumed from the checkpoint of step {resumed[0][-1].restored}, and ran to step {resumed[0][-1].step}")
    trained = [digests(cluster, run) for run in (UNINTERRUPTED, RESUMED)]
    claims = [
        lost_claim(cluster, lost, resumed),
        duties_claim(seen, lost),
        listed_claim(cluster, left[-1]),
        compare_losses(last(whole), [launches[0] for launches in resumed], "losses before the loss of the node"),
        compare_losses(last(whole), last(resumed), "every loss after the resumption"),
        *compare_states(*[[rank["state"] for rank in ranks] for ranks in trained]),
    ]
    report.print_losses(cluster.console, cluster.save_every, whole, resumed)
    report.print_claims(cluster.console, claims)
    say(f"   {time.monotonic() - began:.0f} s in all")
    return all(claim.holds for claim in claims), left


def finish(cluster: ClusterStage, run: str, shares: Sequence[RanksOn]) -> None:
    """Train until the run is complete."""
    log = cluster.place(run) / "trainer.log"
    with launched(shares, log, arguments(cluster, run)) as jobs:
        watch(cluster, run, jobs, until=lambda launches: False)
        statuses = [job.poll() for job in jobs]
        if any(statuses):
            raise DemoFailed(f"the launchers of {run!r} ended with {statuses}", log)


def train_and_lose(cluster: ClusterStage) -> Loss:
    """Train past the middle, and kill the node on duty, after a save was staged and a few more steps are done."""
    told = cluster.machines[0].nodes()
    busy = [machine for machine in cluster.machines if machine.name in told and told[machine.name].duties]
    doomed = busy[0] if busy else cluster.machines[-1]
    others = [machine for machine in cluster.machines if machine is not doomed]
    middle = cluster.steps // 2

    def is_time(launches: Sequence[LaunchRecord]) -> bool:
        staged = min(max(launch.staged, default=0) for launch in launches)
        return staged >= middle and min(launch.step for launch in launches) >= staged + 2

    log = cluster.place(RESUMED) / "trainer.log"
    with launched([RanksOn(machine, 1) for machine in (*others, doomed)], log, arguments(cluster, RESUMED)) as jobs:
        watch(cluster, RESUMED, jobs, until=is_time)
        if any(job.poll() is not None for job in jobs):
            raise DemoFailed("the trainer ended before its node could be killed", log)
        told = others[0].nodes()
        duties = tuple(told[doomed.name].duties) if doomed.name in told else ()
        processes = doomed.daemon.kill() + jobs[-1].kill()
        limit = time.monotonic() + NOTICE_S_MAX
        while any(job.poll() is None for job in jobs) and time.monotonic() < limit:
            time.sleep(POLL_S)
    launches = last(journals(cluster, RESUMED))
    staged = min(max(launch.staged, default=0) for launch in launches)
    return Loss(doomed, duties, max(launch.step for launch in launches), staged, processes)


def wait_until_lost(cluster: ClusterStage, lost: Loss, witness: Machine) -> dict[str, Node]:
    """Wait until another node reports the loss, and that others have its duties; returns all nodes as it lists them."""
    name = lost.machine.name
    limit = time.monotonic() + LOST_S_MAX
    while True:
        seen = witness.nodes()
        taken = {duty for node in seen.values() for duty in node.duties if node.name != name}
        if name in seen and seen[name].state == "lost" and taken >= set(lost.duties):
            return seen
        if time.monotonic() > limit:
            raise DemoFailed(f"{witness.name} does not tell that {name} is lost", cluster.directory / f"{witness.name}.log")
        time.sleep(0.5)


def watch(cluster: ClusterStage, run: str, jobs: list[LaunchedJob], until: Callable[[Sequence[LaunchRecord]], bool]) -> None:
    """Show the run's progress, until its launchers have ended or `until(all ranks' launches)`."""
    before = len(journals(cluster, run)[0])
    deadline = time.monotonic() + LAUNCH_S_MAX
    with RunProgress(cluster.console, run, cluster.steps, cluster.save_every) as progress:
        while any([job.poll() is None for job in jobs]):
            launches = journals(cluster, run)
            if all(len(rank) > before for rank in launches):
                progress.show(min(launch.step for launch in last(launches)), None)
                if until(last(launches)):
                    return
            if time.monotonic() > deadline:
                raise DemoFailed(f"{run!r} did not end within {LAUNCH_S_MAX} s", cluster.place(run) / "trainer.log")
            time.sleep(POLL_S)


def lost_claim(cluster: ClusterStage, lost: Loss, resumed: Sequence[Sequence[LaunchRecord]]) -> Claim:
    """At most the running save is lost with the node."""
    restored = {rank[-1].restored for rank in resumed}
    (step,) = restored if len(restored) == 1 else (0,)
    holds = lost.staged - cluster.save_every <= step <= lost.step and step > 0
    evidence = f"killed at step {lost.step}, the last save of all ranks was {lost.staged}, all resumed from {step}"
    return Claim("a node lost, at most one save", holds, evidence)


def duties_claim(seen: dict[str, Node], lost: Loss) -> Claim:
    """Other nodes took over the lost node's duties."""
    now = {duty: node.name for node in seen.values() for duty in node.duties}
    holds = bool(lost.duties) and all(now.get(duty) not in (None, lost.machine.name) for duty in lost.duties)
    taken = ", ".join(f"{duty} by {now.get(duty)}" for duty in lost.duties)
    return Claim("its duties are taken over", holds, taken or "it had none")


def listed_claim(cluster: ClusterStage, witness: Machine) -> Claim:
    """Every node lists the checkpoints of all."""
    with Api(witness.url) as api:
        steps = sorted(found.step for found in api.checkpoints(RESUMED))
    holds = bool(steps) and steps[-1] == cluster.steps
    return Claim("one list of checkpoints", holds, f"{witness.name} lists steps {', '.join(map(str, steps))}")


def arguments(cluster: ClusterStage, run: str) -> list[str]:
    numbers = ["--steps", str(cluster.steps), "--save-every", str(cluster.save_every)]
    where = ["--directory", str(cluster.place(run)), "--compute-dtype", cluster.products.compute_dtype]
    return ["--name", run, *numbers, *where]


def journals(cluster: ClusterStage, run: str) -> list[list[LaunchRecord]]:
    paths = [cluster.place(run) / f"rank-{rank}.jsonl" for rank in range(cluster.ranks)]
    return [parse_journal(path.read_text()) if path.exists() else [] for path in paths]


def last(launches: Sequence[Sequence[LaunchRecord]]) -> list[LaunchRecord]:
    return [rank[-1] for rank in launches]


def digests(cluster: ClusterStage, run: str) -> list[dict[str, dict[str, str]]]:
    """The digests of each rank's final state."""
    return [json.loads((cluster.place(run) / f"digests-{rank}.json").read_text()) for rank in range(cluster.ranks)]


def _stay(console: Console, left: Sequence[Machine]) -> None:
    console.print(f"The nodes that are left still run. Look:  holdfast open --url {left[0].url}", soft_wrap=True)
    console.print("Ctrl-C ends all of it.")
    try:
        while True:
            time.sleep(1)
    except KeyboardInterrupt:
        console.print("Stopping.")


def _fresh(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    taken = [int(path.name[6:]) for path in directory.glob("nodes-*") if path.name[6:].isdigit()]
    place = directory / f"nodes-{max(taken, default=0) + 1:03d}"
    for name in ("data", UNINTERRUPTED, RESUMED):
        (place / name).mkdir(parents=True)
    return place
