"""`python -m holdfast_service`: wires storage, control, daemon and the REST edge into one process, and ends it again."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from holdfast_formats import naming, rest
from holdfast_formats.errors import CheckpointError, RootBusy, exit_status
from holdfast_service import __version__
from holdfast_service.config import Config, fd_store, parse
from holdfast_service.control.catalog import Catalog
from holdfast_service.control.decisions import Decisions
from holdfast_service.daemon.adoption import Adoption
from holdfast_service.daemon.arena import Arena
from holdfast_service.daemon.budget import Budget
from holdfast_service.daemon.keeping import FdStore, HolderProcess, Keeper
from holdfast_service.daemon.loader import Loader
from holdfast_service.daemon.remote import RemoteRanks
from holdfast_service.daemon.saver import Saver
from holdfast_service.daemon.server import Daemon, Identity
from holdfast_service.daemon.spill import Spill
from holdfast_service.storage.pacing import Pace
from holdfast_service.storage.posix import PosixTier, lock_root
from holdfast_service.telemetry import start_logging

if TYPE_CHECKING:
    from holdfast_service.api.app import Services

log = logging.getLogger("holdfast_service")

IDLE_CHECK_S = 0.5


class Activity:
    """When anybody last used this daemon."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def touch(self) -> None:
        self._last = time.monotonic()

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self._last


def main(arguments: list[str] | None = None) -> int:
    """Serve until told to stop; the exit status follows the error's branch."""
    try:
        config = parse(sys.argv[1:] if arguments is None else arguments)
        start_logging(config.log_level)
        with _running(config) as (daemon, services, listener):
            _serve(config.exit_when_idle, daemon, services, listener)
    except CheckpointError as error:
        print(f"holdfast serve: {error}", file=sys.stderr)
        return exit_status(error)
    except ValueError as error:
        print(f"holdfast serve: {error}", file=sys.stderr)
        return 2
    return 0


@contextmanager
def _running(config: Config) -> Iterator[tuple[Daemon, Services, socket.socket | None]]:
    from holdfast_service.api.app import Services

    budget = Budget(config.arena_bytes_max)
    root = config.root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.callback(lock_root(root).release)
        listener = stack.enter_context(_bind(config.listen)) if config.listen else None
        url = "http://{}:{}".format(*listener.getsockname()[:2]) if listener else None
        tier = PosixTier(root, Pace(config.write_bytes_per_second) if config.write_bytes_per_second else None)
        catalog = Catalog.open(config.catalog_url)
        stack.callback(catalog.close)
        decisions = Decisions(tier, catalog, config.keep)
        stack.callback(decisions.close)
        keeper = _keeper(root, config)
        stack.callback(keeper.close)
        saver = Saver(tier, decisions, config.node)
        spill = Spill(root) if config.spill == "auto" else None
        arena = Arena(budget, keeper, spill, saver.holds.make_room)
        adoption = Adoption(arena, saver, decisions)
        decisions.recover(adoption.start)
        identity = Identity(config.node, str(root), __version__, url)
        loader = Loader(tier, arena)
        daemon = Daemon(config.socket.absolute(), identity, (arena, saver, decisions, adoption, loader))
        stack.callback(daemon.close)
        remote = RemoteRanks((arena, saver, decisions), config.silence_max)
        stack.callback(remote.close)
        at = os.stat(daemon.path)
        socket_id = naming.socket_id(at.st_ino, at.st_ctime_ns)
        started = datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")

        def node() -> rest.Node:
            return rest.Node(
                name=config.node,
                pid=os.getpid(),
                version=__version__,
                root=str(root),
                socket=str(daemon.path),
                started=started,
                arena_bytes=arena.bytes,
                ranks=daemon.ranks + remote.count,
                socket_id=socket_id,
            )

        about = {"pid": os.getpid(), "socket": str(daemon.path), "url": url}
        tier.replace(naming.DAEMON_FILE, json.dumps(about).encode() + b"\n")
        stack.callback(tier.remove_file, naming.DAEMON_FILE)
        log.info("arena: up to %d bytes (%s)", budget.bytes_max, budget.name)
        log.info("serving %s at %s%s", root, daemon.path, f" and {url}" if url else "")
        yield (
            daemon,
            Services(
                tier=tier,
                catalog=catalog,
                root=str(root),
                version=__version__,
                node=node,
                rotation=decisions.rotation,
                files_root=Path(root),
                remote=remote,
                restore_bytes=loader.counts.all,
            ),
            listener,
        )


def _keeper(root: Path, config: Config) -> Keeper:
    """Who keeps shared memory while no daemon lives. A root's holder is found by its root: the socket may change."""
    store = fd_store()
    if store is not None:
        return FdStore(store.notify, store.inherited)
    name = hashlib.sha256(bytes(root)).hexdigest()[:12]
    return HolderProcess(config.socket.absolute().parent / f"{name}.holder")


def _bind(address: tuple[str, int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    # The protocol is named so that asyncio recognises TCP and sends small answers at once (TCP_NODELAY).
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
        return listener
    except OSError as error:
        listener.close()
        raise RootBusy(
            f"cannot listen at {address[0]}:{address[1]}: {error.strerror}",
            hint="another daemon may be there: choose another --listen, or stop it",
        ) from error


def _serve(exit_when_idle: float | None, daemon: Daemon, services: Services, listener: socket.socket | None) -> None:
    activity = Activity()
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    with ExitStack() as stack:
        if listener is not None:
            stack.enter_context(_http(listener, services, activity, stop))
        while not stop.wait(IDLE_CHECK_S):
            if daemon.busy:
                activity.touch()
            if exit_when_idle is not None and activity.idle_s > exit_when_idle:
                log.info("idle for %.0f s, ending", activity.idle_s)
                return


@contextmanager
def _http(listener: socket.socket, services: Services, activity: Activity, stop: threading.Event) -> Iterator[None]:
    """The REST edge in a thread of its own, so that the main thread stays free for signals."""
    import uvicorn

    from holdfast_service.api.app import create_app

    app = create_app(services)

    async def noticed(scope, receive, send):  # type: ignore[no-untyped-def]
        activity.touch()
        await app(scope, receive, send)

    server = uvicorn.Server(uvicorn.Config(noticed, log_level="warning", access_log=False, lifespan="off"))

    def run() -> None:
        try:
            server.run(sockets=[listener])
        finally:
            stop.set()

    thread = threading.Thread(target=run, name="holdfast-http", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        if services.remote is not None:
            services.remote.close()  # who waits for an outcome would keep the server from ending
        thread.join(timeout=10)


if __name__ == "__main__":
    sys.exit(main())
