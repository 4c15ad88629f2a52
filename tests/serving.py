"""A real service over HTTP: the real catalog and tier, behind uvicorn in a thread, on a port of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from fastapi import FastAPI

from holdfast_formats import naming
from holdfast_formats.rest import bodies
from holdfast_formats.rest.operations import Job
from holdfast_service.api.access.connections import server as bounded
from holdfast_service.api.app import RestApi, Services
from holdfast_service.config import RootPlace
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.control import Control
from holdfast_service.control.insight.copy_lags import CopyLags
from holdfast_service.control.insight.round_history import RoundHistory
from holdfast_service.control.insight.summary_queries import Lives, Summaries, no_lives
from holdfast_service.control.jobs.runner import JobKind, Progress
from holdfast_service.control.nodes import ONE_NODE, Nodes
from holdfast_service.daemon.arena.arena import Arena
from holdfast_service.daemon.arena.budget import Budget
from holdfast_service.daemon.checking.checker import Checker
from holdfast_service.daemon.copying.repair import Repairer
from holdfast_service.daemon.job_workers import Workers
from holdfast_service.daemon.remote import RemoteRanks
from holdfast_service.daemon.saving.saver import Saver
from holdfast_service.daemon.scrub import CheckJobs, Scrub, ScrubPlan
from holdfast_service.storage import PosixTier, stored_in
from holdfast_service.wings.notify.running import Notifying
from holdfast_service.wiring.job_handlers import start_jobs
from tests.databases import sqlite_url

WINGS = {"notify": Notifying()}  # which neither notifies nor watches


class Served(NamedTuple):
    url: str
    root: Path
    services: Services
    app: FastAPI


@contextmanager
def services(root: Path, place: Path | None = None, nodes: Nodes = ONE_NODE, lives: Lives = no_lives) -> Iterator[Services]:
    """Services over a root, every committed checkpoint of it in the catalog; jobs may name directories below `place`."""
    tier = PosixTier(root)
    catalog = Catalog.open(sqlite_url(root / naming.CATALOG))
    control = Control(stored_in(tier), catalog, None, nodes)
    control.recovery.recover()

    def node() -> bodies.Node:
        return bodies.Node(
            name="node-1", pid=1, version="9.9", root=str(root), socket=None, started="now", arena_bytes=4096, ranks=2
        )

    checker = Checker(tier, control)
    saver = Saver(tier, control, "node-1", checker)
    arena = Arena(Budget())
    remote = RemoteRanks(arena, saver, control)
    scrub = Scrub(checker, control, saver, ScrubPlan(None, None))
    repairer = Repairer(control, dict)
    runner = start_jobs("node-1", Workers(catalog, control, CheckJobs(checker, scrub, tier), repairer, place))
    summaries, history = Summaries(stored_in(tier).store, catalog, lives), RoundHistory(catalog.database, "node-1")
    try:
        yield Services(
            control,
            RootPlace(str(root), root),
            "9.9",
            node,
            saver,
            arena,
            remote,
            runner,
            summaries,
            history,
            CopyLags(catalog.database),
            {},
        )
    finally:
        runner.close()
        scrub.close()
        remote.close()
        saver.close()
        control.close()
        catalog.close()


@contextmanager
def served(
    directory: Path,
    place: Path | None = None,
    nodes: Nodes = ONE_NODE,
    lives: Lives = no_lives,
    **changes: object,
) -> Iterator[Served]:
    """The API over a root directory, on a free port of the loopback; `changes` replace parts of its `Services`."""
    # The protocol is named so that asyncio recognises TCP and sends small answers at once (TCP_NODELAY).
    with (
        services(directory, place, nodes, lives) as made,
        socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener,
    ):
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # from here on nobody is refused, though the server has still to start
        made = replace(made, **changes)  # type: ignore[arg-type]
        app = RestApi(made, WINGS)
        server = bounded(app, "critical")
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="test-http")
        thread.start()
        try:
            yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", directory, made, app)
        finally:
            server.should_exit = True
            made.control.events.hang_up()
            thread.join(timeout=180)
            made.audit.close()


@pytest.fixture
def http(service: Served) -> Iterator[httpx.Client]:
    """A connection to the module's `service`."""
    with httpx.Client(base_url=service.url, trust_env=False, verify=False, timeout=180) as client:
        yield client


def received(connection: socket.socket) -> bytes:
    """Everything until the service hangs up."""
    answer = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(65_536):
            answer += part
    return answer


def hold_up(service: Served) -> None:
    """Have export jobs do nothing until they are cancelled."""

    def handler(job: Job, progress: Progress) -> dict[str, Any]:
        while True:
            progress.report(1, 2)
            time.sleep(0.005)

    service.services.runner._kinds["export"] = JobKind(handler)  # type: ignore[index]
