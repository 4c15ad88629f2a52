"""Everything that pages can show, at once and at rest: real daemons over roots in which all has happened that alerts are
about, and for each way of pressing a button runs of its own that may be thrown away.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
from safetensors.numpy import save_file

from holdfast.rest.api import Api
from holdfast_formats import naming, timestamps
from holdfast_formats.rest.operations import NewToken
from holdfast_service.control.database.cluster_schema import NodeRow
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import JobRow
from tests.checkpoints import build, build_root, flip, varied_arrays
from tests.daemons import RunningDaemon, running, wait_until
from tests.databases import running_postgres, why_not
from tests.forked import Forked
from tests.kit.lost_runs import lose
from tests.wings.notify.receivers import Web, secret, serving

WAYS = ("mouse", "plain", "keyboard")  # with scripts; without any; with the keyboard alone
LONG = ("a-run-of-which-the-name-is-longer-than-any-column-of-a-table-" + "x" * 128)[:128]
STEPS = (999_999_000_000, 999_999_000_500, 999_999_001_000)  # of the long run
MANY = "many"  # more checkpoints than a page of the table has
LABEL = "release-candidate-with-a-label-that-is-as-long-as-a-label-may-be"
FINISHED, ILL = "tiny-finished", "tiny-nan"
OWN = {
    "marks": (5, 10, 15, 20, 25),  # pinned, labelled, removed
    "full": (5, 10),  # with a quota that is nearly used up
    "damaged": (5, 10),
    "care": (5,),  # archived, taken back, described
    "going": (5,),  # deleted
    "gone": (5,),  # purged
    "back": (5,),  # brought back
    "kept": (5, 10, 15),  # a policy is set
}
LIMIT_S, ANSWER_S = 600.0, 120.0  # on a busy machine


class Scene(NamedTuple):
    """Two daemons: one that lets everybody in, and one that asks for tokens, which the first one watches."""

    daemon: RunningDaemon
    closed: RunningDaemon
    token: str  # of an admin of the closed one
    web: Web
    catalog: str
    shared: bool  # whether nodes share the catalog

    @property
    def url(self) -> str:
        return self.daemon.url

    def ask(self, path: str) -> Any:
        """What the API answers, None where there is no such thing."""
        got = httpx.get(f"{self.url}{path}", trust_env=False, timeout=ANSWER_S)
        return got.json() if got.status_code == 200 else None

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        got = httpx.request(method, f"{self.url}{path}", json=body, headers=headers, trust_env=False, timeout=ANSWER_S)
        assert got.status_code < 400, got.text
        return got

    def done(self, request: dict[str, Any]) -> int:
        """The id of a job that has ended."""
        job = self.send("POST", "/v1/jobs", request).json()["id"]
        wait_until(lambda: self.ask(f"/v1/jobs/{job}")["state"] not in ("queued", "running"), LIMIT_S)
        return int(job)

    def running_job(self, key: str) -> int:
        """The id of a job that goes on, on another node, until it is cancelled."""
        with _database(self.catalog) as database, database.write() as session:
            request = {"kind": "export", "run": MANY, "step": 1, "arguments": {"to": key}}
            row = JobRow(kind="export", key=key, state="running", run=MANY, step=1, request=request, cancel=False, tries=1)
            row.done_bytes, row.total_bytes = 1_234_567_890, 9_876_543_210
            here = session.query(NodeRow).order_by(NodeRow.until.desc()).first() if self.shared else None
            row.node, row.boot = (here.name, here.boot) if here else ("another", None)
            row.created = row.started = timestamps.utc_now()
            row.seen = timestamps.later(row.created, 86_400)  # nobody takes it for a job of a node that is gone
            session.add(row)
            session.flush()
            return row.id

    def lost_node(self, name: str) -> None:
        """A node that was lost a while ago, made of this one."""
        with _database(self.catalog) as database, database.write() as session:
            here = session.query(NodeRow).order_by(NodeRow.until.desc()).first()
            assert here is not None
            about = {**here.about, "name": name, "replicas": {}}
            times = {"since": here.since - timedelta(days=2), "until": here.until - timedelta(hours=1)}
            session.add(NodeRow(name=name, boot=name[:32], machine="gone", pid=1, about=about, **times))


@contextmanager
def _database(url: str) -> Iterator[Database]:
    made = Database.open(url)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def scene(place: Path) -> Iterator[Scene]:
    """The daemons, once all has happened."""
    with ExitStack() as stack:
        shared = why_not() is None
        catalog = stack.enter_context(running_postgres()).make("holdfast") if shared else f"sqlite:///{place / 'catalog.db'}"
        _roots(place)
        web = stack.enter_context(serving(Web()))
        closed = stack.enter_context(running(place / "closed", listen="127.0.0.1:0", closed=True))
        token = _token(closed)
        flags = _flags(place, web, closed, token)
        daemon = stack.enter_context(running(place / "root", "--catalog", catalog, *flags, listen="127.0.0.1:0"))
        made = Scene(daemon, closed, token, web, catalog, shared)
        _happen(made, place, stack)
        yield made


def _roots(place: Path) -> None:
    for run, steps in {f"{name}-{way}": steps for name, steps in OWN.items() for way in WAYS}.items():
        for step in steps:
            build(place / "root" / naming.checkpoint_path(run, step), varied_arrays(step), run=run, step=step)
    for step in range(1, 31):
        arrays = {"model": {"w": np.full((4, 4), step, np.float32)}}
        build(place / "root" / naming.checkpoint_path(MANY, step), arrays, run=MANY, step=step)
    for way in WAYS:
        file = sorted((place / "root" / naming.checkpoint_path(f"damaged-{way}", 10)).glob("model*.safetensors"))[0]
        flip(file, file.stat().st_size - 1)
    name = "model.layers.0.a_module_with_a_name_that_goes_on_and_on_and_on.experts.127.down_proj.weight"
    wide = {"model": {name: np.ones((2, 3, 5, 7, 11), np.float32), "b": np.full(1000, np.nan, np.float32)}}
    build_root(place / "root", {LONG: STEPS}, wide)
    build_root(place / "closed", {"elsewhere": (5,), "z" * 128: (123_456_789,), **{f"named-{way}": (5,) for way in WAYS}})
    for name in ("far", "exports/model"):
        (place / name).mkdir(parents=True)
    save_file({"w": np.ones((3, 4), np.float32)}, place / "exports/model/model.safetensors", metadata={"format": "pt"})
    (place / "exports/model/old.gguf").write_bytes(b"")


def _flags(place: Path, web: Web, closed: RunningDaemon, token: str) -> list[str]:
    """What the first daemon is told: a replica, people to notify, other daemons to watch, one of which is not there."""
    targets = "".join(
        f'[[target]]\nname = "{name}"\nkind = "webhook"\nurl = "{web.url}/{name}"\nsecret_file = "{key}"\n'
        for name in WAYS
        for key in [secret(place, "0123456789abcdef-secret", f"key-{name}")]
    )
    (place / "notify.toml").write_text(targets)
    listed = secret(place, f"{closed.url} {token}", "tokens")
    away = "http://127.0.0.1:9"
    told = ["--watch", closed.url, "--watch", away, "--watch-tokens", str(listed), "--notify", str(place / "notify.toml")]
    return [*told, "--replica", f"far={place / 'far'}", "--export-root", str(place / "exports")]


def _token(daemon: RunningDaemon) -> str:
    with Api(daemon.url) as api:
        answer = api.request("POST", "/v1/tokens", json={"name": "admin", "scope": "admin", "runs": "*"})
    return NewToken.model_validate_json(answer.content).token


def _happen(at: Scene, place: Path, stack: ExitStack) -> None:
    """Runs die, finish and get NaN; a disk flips a bit, a quota is used up, a replica is lost, and so on."""
    lost = [f"dead-{way}" for way in WAYS]
    for run in lost:
        lose(at.daemon, run)
    fates = [Forked(["-m", "tests.wings.console.fates", at.daemon.socket, run, fate]) for run, fate in _FATES]
    for one in fates:
        stack.enter_context(one)
        stack.callback(one.kill)
    wait_until(lambda: at.ask(f"/v1/runs/{ILL}/summary") and _ill(at), LIMIT_S)
    fates[1].kill()
    wait_until(lambda: (at.ask(f"/v1/runs/{FINISHED}") or {}).get("life") == "finished", LIMIT_S)
    for way in WAYS:
        at.done({"kind": "verify", "run": f"damaged-{way}", "step": 10})
        at.done({"kind": "verify", "run": f"marks-{way}", "step": 25})
        size = at.ask(f"/v1/runs/full-{way}")["bytes"]
        tag = httpx.get(f"{at.url}/v1/runs/full-{way}/policy", trust_env=False, timeout=ANSWER_S).headers["etag"]
        policy = {**at.ask(f"/v1/runs/full-{way}/policy"), "quota_bytes": size + 1000}
        at.send("PUT", f"/v1/runs/full-{way}/policy", policy, **{"If-Match": tag})
        for name in ("gone", "back"):
            at.send("DELETE", f"/v1/runs/{name}-{way}")
        if at.shared:
            for where in ("overview", "nodes"):
                at.lost_node(f"{where}-{way}")
    for step in STEPS[1:]:
        at.done({"kind": "verify", "run": LONG, "step": step})
    at.send("PATCH", f"/v1/runs/{LONG}", {"owner": "o" * 128, "notes": "n" * 300 + " and more\n" * 5})
    at.send("PUT", f"/v1/runs/{LONG}/checkpoints/{STEPS[0]}/labels/{LABEL}")
    at.send("PUT", f"/v1/runs/{LONG}/checkpoints/{STEPS[0]}/pin")
    at.send("PUT", f"/v1/quotas/{LONG}", {"quota_bytes": 9_876_543_210_987})
    for name in ("spare", *(f"{what}-{way}" for what in ("rotate", "revoke") for way in WAYS)):
        at.send("POST", "/v1/tokens", {"name": name, "scope": "write", "runs": "team-*", "bytes_per_s": 10**12})
    (place / "far").rename(place / "away")
    wanted = {*((run, "run-died") for run in (*lost, ILL)), ("far", "replica-lost"), (ILL, "checkpoint-unhealthy")}
    wanted |= {(f"full-{way}", "quota-nearly-full") for way in WAYS} | {
        (f"damaged-{way}", "checkpoint-damaged") for way in WAYS
    }
    wait_until(lambda: wanted <= alerts(at), LIMIT_S)


_FATES = ((FINISHED, "finishes"), (ILL, "nan"))


def _ill(at: Scene) -> bool:
    return any(one["code"] == "checkpoint-unhealthy" for one in at.ask(f"/v1/runs/{ILL}/summary")["attention"])


def alerts(at: Scene) -> set[tuple[str, str]]:
    """By run or subject, and code: those that nobody has acknowledged."""
    items = at.ask("/v1/alerts?acknowledged=false&limit=1000")["items"]
    return {(one["run"] or one["subject"], one["code"]) for one in items}
