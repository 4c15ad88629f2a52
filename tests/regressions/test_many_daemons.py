"""Real daemons of several nodes on one root, with one PostgreSQL: started, killed, cut off, refused where they must be."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import Checkpointer
from holdfast.rest import service_jobs
from holdfast.rest.api import Api
from holdfast.stage.daemon_requests import WORK_MAX_S
from holdfast_formats import naming
from holdfast_formats.errors import DaemonGone, RunBusy
from holdfast_formats.rest.offline import CatalogWork
from holdfast_service.control.database.engines import ANSWER_TIMEOUT_S
from tests.daemons import RunningDaemon, wait_until
from tests.databases import Postgres

pytestmark = pytest.mark.usefixtures("forked_programs")


class Daemon(RunningDaemon):
    """The daemon of one node of several."""

    def __init__(self, root: Path, name: str, url: str, *flags: str, before: tuple[str, ...] = ()) -> None:
        self.name = name
        socket = str(root.parent / f"{name}.sock")
        named = ("--node", name, "--catalog", url, *flags, "--socket", socket)
        super().__init__(root, *named, listen="127.0.0.1:0", before=before)
        self.socket = Path(socket)


class Site:
    def __init__(self, root: Path, postgres: Postgres, url: str) -> None:
        self.root, self.postgres, self.url = root, postgres, url
        self.daemons: list[Daemon] = []

    def start(self, name: str, *flags: str) -> Daemon:
        made = Daemon(self.root, name, self.url, *flags)
        self.daemons.append(made)
        return made


@pytest.fixture
def site(tmp_path: Path, postgres: Postgres) -> Iterator[Site]:
    url = postgres.take()
    made = Site(tmp_path / "root", postgres, url)
    yield made
    for daemon in made.daemons:
        if daemon.process.poll() is None:
            daemon.stop()
    postgres.give_back(url)


def a_state(value: float, elements: int = 16) -> dict[str, Any]:
    return {"model": {"weight": torch.full((elements,), value)}}


def nodes(daemon: Daemon) -> dict[str, dict[str, Any]]:
    with Api(daemon.url) as api:
        return {node.name: node.model_dump() for node in api.nodes()}


def steps(root: Path, run: str) -> list[int]:
    found = [naming.parse_step_directory(path.name) for path in (root / run / naming.CHECKPOINTS).iterdir()]
    return sorted(step for step in found if step is not None)


def test_two_nodes_train_and_each_knows_what_the_other_does(site: Site) -> None:
    """Two runs, one root: all checkpoints are listed by both, soon after their commits; a run that trains elsewhere is busy,
    and goes on there once its ranks are gone here.
    """
    a, b = site.start("a"), site.start("b")
    with Checkpointer("one", a_state(1.0), at=a.socket) as one, Checkpointer("two", a_state(2.0), at=b.socket) as two:
        for step in (1, 2):
            one.save(step, wait="durable").result()
            two.save(step, wait="durable").result()
        with pytest.raises(RunBusy, match="node a"):
            Checkpointer("one", a_state(0.0), at=b.socket).save(9)
        assert {name: node["live"] for name, node in nodes(b).items()} == {"a": True, "b": True}
        for daemon in (a, b):
            with Api(daemon.url) as api:
                wait_until(lambda api=api: _newest(api) == {"one": 2, "two": 2})
    state = a_state(0.0)
    with Checkpointer("one", state, at=b.socket) as again:
        assert again.restore() == 2 and torch.equal(state["model"]["weight"], torch.ones(16))
        again.save(3, wait="durable").result()
    assert steps(site.root, "one") == [1, 2, 3]
    with Api(a.url) as api:
        wait_until(lambda: [found.attempt for found in api.checkpoints("one")] == [2, 1, 1])


def test_a_node_that_starts_disturbs_nobody(site: Site) -> None:
    """Node a writes slowly when node b starts on the same root and catalog: its save is committed, its list stands."""
    a = site.start("a", "--write-bytes-per-second", "4000000")
    with Checkpointer("one", a_state(1.0, 3_000_000), at=a.socket) as one:
        one.save(1, wait="durable").result()
        ticket = one.save(2)
        wait_until(lambda: any((site.root / "one" / naming.STAGING).glob("*/*.safetensors")))
        b = site.start("b")
        ticket.result()
    with Api(b.url) as api:
        wait_until(lambda: [found.step for found in api.checkpoints("one")] == [2, 1])
        wait_until(lambda: [found.state for found in api.rounds("one")] == ["committed", "committed"])


def test_a_killed_node_is_back_at_once_and_the_others_never_noticed(site: Site) -> None:
    """SIGKILL: what was committed is there, the next daemon of that name joins without waiting for a lease, and commits what
    its ranks had sealed.
    """
    a, b = site.start("a", "--write-bytes-per-second", "4000000"), site.start("b")
    with (
        Checkpointer("one", a_state(1.0, 3_000_000), at=a.socket) as one,
        Checkpointer("two", a_state(2.0), at=b.socket) as two,
    ):
        ticket = one.save(1)
        wait_until(lambda: any((site.root / "one" / naming.STAGING).glob("*/*.safetensors")))
        a.kill()
        two.save(1, wait="durable").result()
        a = site.start("a")
        assert "waiting until its lease ends" not in a.log.read_text()
        ticket.result()
        one.save(2, wait="durable").result()
        two.save(2, wait="durable").result()
    assert steps(site.root, "one") == [1, 2] == steps(site.root, "two")


def test_training_goes_on_on_all_nodes_while_the_catalog_is_away(site: Site) -> None:
    """Saves are committed without PostgreSQL, a launch that starts gets an attempt of its own, and both nodes list all of it
    when it is back.
    """
    a, b = site.start("a"), site.start("b")
    with Checkpointer("one", a_state(1.0), at=a.socket) as one, Checkpointer("two", a_state(2.0), at=b.socket) as two:
        one.save(1, wait="durable").result()
        two.save(1, wait="durable").result()
        site.postgres.stop()
        try:
            one.save(2, wait="durable").result()
            two.save(2, wait="durable").result()
        finally:
            site.postgres.start()
    for daemon in (a, b):
        with Api(daemon.url) as api:
            wait_until(lambda api=api: _newest(api) == {"one": 2, "two": 2})
            wait_until(lambda d=daemon: all(node["live"] for node in nodes(d).values()))


def test_a_catalog_that_stops_answering_stalls_no_save(site: Site) -> None:
    """SIGSTOP: the server keeps its connections and says nothing on them. Each save is committed all the same, and a launch
    begins. save() never asks the catalog: it would give up on the daemon before the daemon gives up on the catalog. The
    first commits do, and no other one waits once it is known not to answer.
    """
    assert ANSWER_TIMEOUT_S > WORK_MAX_S
    a = site.start("a")
    with Checkpointer("one", a_state(1.0), at=a.socket) as one:
        one.save(1, wait="durable").result()
        site.postgres.signal_all(signal.SIGSTOP)
        try:
            for step in range(2, 8):
                one.save(step).result(timeout=180)
            assert a.log.read_text().count("the catalog did not answer within") <= 3
            with Checkpointer("another", a_state(1.0), at=a.socket) as another:
                another.save(1, wait="durable").result()
        finally:
            site.postgres.signal_all(signal.SIGCONT)
    assert steps(site.root, "one") == list(range(1, 8)) and steps(site.root, "another") == [1]


def _newest(api: Api) -> dict[str, int | None]:
    try:
        return {run.name: run.newest for run in api.runs()}
    except Exception:
        return {}


def test_a_daemon_that_would_serve_a_shared_root_alone_is_refused(site: Site) -> None:
    """With a catalog of its own it would number attempts, sweep and remove as if nobody else were there: also when the
    others run on machines whose locks it cannot see.
    """
    a = site.start("a")
    refused = started(site.root)
    assert refused.returncode == 4 and "root-busy" in refused.stderr and "--catalog" in refused.stderr
    a.stop()
    refused = started(site.root)
    assert refused.returncode == 4 and "wrong-root" in refused.stderr, refused.stderr
    assert "catalog adopt" in refused.stderr and "secret" not in refused.stderr and "postgresql" in refused.stderr
    asked = CatalogWork(act="adopt", root=str(site.root)).model_dump_json().encode()
    assert subprocess.run(service_jobs.command(), input=asked, capture_output=True, timeout=180).returncode == 0
    assert started(site.root).returncode == 0


def test_two_daemons_of_one_machine_have_two_names(site: Site) -> None:
    """The second one of a name is refused without waiting, and the first one goes on."""
    a = site.start("a")
    refused = started(site.root, "--catalog", site.url, "--node", "a")
    assert refused.returncode == 4 and "--node" in refused.stderr and str(a.process.pid) in refused.stderr
    assert "waiting until its lease ends" not in refused.stderr and nodes(a)["a"]["live"]


def test_a_trainer_starts_no_daemon_of_its_own_on_a_shared_root(site: Site) -> None:
    """It says which daemon is missing on this machine."""
    site.start("a").stop()
    with pytest.raises(DaemonGone, match="share") as refused, Checkpointer("one", a_state(1.0), at=site.root) as one:
        one.save(1)
    assert "--catalog postgresql" in str(refused.value.hint) and "secret" not in str(refused.value)


def test_a_root_that_one_daemon_serves_alone_is_not_shared(site: Site) -> None:
    """The other way round: who comes with PostgreSQL waits for nobody and is told who is there."""
    alone = RunningDaemon(site.root)
    refused = started(site.root, "--catalog", site.url)
    assert refused.returncode == 4 and str(alone.process.pid) in refused.stderr
    alone.stop()


def test_a_directory_leads_to_the_daemon_of_this_machine(site: Site) -> None:
    """`at=` the shared directory: the trainer finds a daemon, and goes on with the other one when that is gone."""
    a, b = site.start("a"), site.start("b")
    with Checkpointer("one", a_state(1.0), at=site.root) as one:
        one.save(1, wait="durable").result()
    a.kill()
    with Checkpointer("two", a_state(1.0), at=site.root) as two:
        two.save(1, wait="durable").result()
    assert nodes(b)["b"]["live"]
    assert steps(site.root, "one") == [1] == steps(site.root, "two")


def started(root: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """A daemon that ends by itself if it is let in."""
    where = ["--root", str(root), "--socket", str(root.parent / "another.sock"), "--listen", "none"]
    command = [sys.executable, "-m", "holdfast_service", *where, *flags, "--exit-when-idle", "1"]
    return subprocess.run(command, capture_output=True, text=True, timeout=180)
