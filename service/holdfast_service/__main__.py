"""`python -m holdfast_service`: run storage, control, daemon and the REST edge in one process."""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until `gc_tuning.settle`: a start makes many objects, and almost no garbage

import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from holdfast_formats.errors import CheckpointError, RootBusy, exit_status
from holdfast_formats.owner_key import bracketed, reachable
from holdfast_formats.root_files import DaemonFile
from holdfast_service import __version__
from holdfast_service.config import LISTEN, Config, is_shared, parse, service_manager
from holdfast_service.daemon.server import Daemon
from holdfast_service.observe.logs import log_what_nobody_catches, start_logging
from holdfast_service.observe.service_manager import ServiceManager
from holdfast_service.storage import libc
from holdfast_service.storage.directories import identity_of
from holdfast_service.storage.locking import lock_node, lock_root
from holdfast_service.wing import RunningWing
from holdfast_service.wiring import assembly, gc_tuning
from holdfast_service.wiring.announcement import announced
from holdfast_service.wiring.stopping import StopReport

if TYPE_CHECKING:
    from holdfast_service.api.access.authentication import Policy
    from holdfast_service.api.services import Services
    from holdfast_service.control.control import Control
    from holdfast_service.control.jobs.runner import JobRunner

log = logging.getLogger("holdfast_service")

IDLE_CHECK_S = 0.5
ROOT_GONE_S = 600.0  # of a root that is not there: it may be mounted again
DEFAULT_URL = f"http://{LISTEN}"


class StopSignal:
    """Ends the wait of the main thread, also from a signal handler that interrupts this very wait.

    `threading.Event` would not do: between two lines of its `wait` its lock is taken, and `set` in a handler would wait for
    ever. A `SimpleQueue` is documented to be reentrant.
    """

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[str] = queue.SimpleQueue()

    def set(self, reason: str) -> None:
        self._asked.put(reason)

    def wait(self, timeout_s: float) -> str | None:
        """The reason, if it was set within so many seconds. Only the main thread waits, and only until it is set."""
        with suppress(queue.Empty):
            return self._asked.get(timeout=timeout_s)
        return None


class Activity:
    def __init__(self) -> None:
        self._last = time.monotonic()

    def touch(self) -> None:
        self._last = time.monotonic()

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self._last


class Edge(NamedTuple):
    """What the API serves, and the parts of wings that run."""

    services: Services
    wings: Mapping[str, RunningWing]


class Served(NamedTuple):
    """All that runs; `listener` is of the API, if it is served."""

    daemon: Daemon
    control: Control
    runner: JobRunner
    edge: Edge | None
    listener: socket.socket | None


class RootPresence:
    """Whether the served directory is still at its path."""

    def __init__(self, root: Path) -> None:
        self._root, self._at = root, identity_of(root.stat())
        self._seen = time.monotonic()

    @property
    def gone_s(self) -> float:
        """Seconds since it was gone or replaced."""
        try:
            if identity_of(self._root.stat()) == self._at:
                self._seen = time.monotonic()
        except OSError:
            pass
        return time.monotonic() - self._seen


def main(arguments: list[str] | None = None) -> int:
    """Serve until stopped; return the exit status of the error's branch."""
    try:
        config = parse(sys.argv[1:] if arguments is None else arguments)
        start_logging(config.log_level, config.log_format, config.node)
        log_what_nobody_catches()
        libc.give_memory_back()
        stop, manager = StopSignal(), ServiceManager(*service_manager())
        with ExitStack() as until_stopped, _running(config, stop, manager) as serving:
            _serve(config, serving, stop, manager, until_stopped)
    except CheckpointError as error:
        print(f"holdfast serve: {error}", file=sys.stderr)
        return exit_status(error)
    except ValueError as error:
        print(f"holdfast serve: {error}", file=sys.stderr)
        return 2
    return 0


@contextmanager
def _running(config: Config, stop: StopSignal, manager: ServiceManager) -> Iterator[Served]:
    """Run all services. Until the address is announced a signal kills; after that it sets `stop`."""
    place, root = config.place, config.place.directory
    with ExitStack() as stack:
        shared = is_shared(config.catalog_url)
        stack.callback(lock_root(root, shared).release)
        if shared:
            stack.callback(lock_node(root, config.node).release)
        listener = stack.enter_context(_bind(config.listen)) if config.listen else None
        url = _url(listener) if listener else None
        manager.starting(f"opening the catalog of {place.label}")
        served = assembly.open_root(config, stack)
        manager.starting("taking over saves and memory of an earlier daemon")
        access = _policy(config, listener)
        node = assembly.open_node(config, served, url, stack)
        observed = assembly.observe(config, served, node, stack)
        edge = None if access is None else _edge(config, served, node, observed, access, stack)
        served.control.events.add(
            "daemon-started", f"{config.node} serves {place.label}", pid=os.getpid(), version=__version__
        )
        if listener is not None and edge is not None and edge.services.access.tokens:
            from holdfast_service.api.access.policy import announced as owner_announced

            stack.enter_context(owner_announced(config, listener, edge.services.owner))
        if served.identity.copy_of is not None:
            text = f"{place.label} is a copy of another root and has a new ID from now on"
            log.warning("%s", text)
            served.control.events.add("root-copied", text, level="warning", copy_of=served.identity.copy_of)
        _heed_signals(stop)
        about = DaemonFile(pid=os.getpid(), socket=str(node.daemon.path), url=url, root=served.identity.mark)
        stack.enter_context(announced(root, about, "" if served.control.nodes.alone else config.node))
        where = "" if listener is None else f" and {':'.join(map(str, listener.getsockname()[:2]))}"
        log.info("serving %s at %s%s", place.label, node.daemon.path, where)
        if url:
            log.info("the dashboard: holdfast open%s", "" if url == DEFAULT_URL else f" --url {url}")
        yield Served(node.daemon, served.control, node.runner, edge, listener)


def _policy(config: Config, listener: socket.socket | None) -> Policy | None:
    """The policy of the API; None for a daemon that has neither API nor notifications, as one that a trainer starts: it does
    without FastAPI, and starts in half the time.
    """
    if listener is None and config.notify is None and not config.watch:
        return None
    from holdfast_service.api.access import policy

    return policy.policy(config, listener)


def _edge(
    config: Config,
    root: assembly.ServedRoot,
    node: assembly.NodeParts,
    observed: assembly.NodeFacts,
    access: Policy,
    stack: ExitStack,
) -> Edge:
    services = assembly.services(config, root, node, observed, access)
    return Edge(services, assembly.start_wings(config, services, stack))


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
            hint="another daemon may be listening there: choose another --listen, or stop that daemon",
        ) from error


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{bracketed(reachable(host))}:{port}"


def _heed_signals(stop: StopSignal) -> None:
    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)


def _serve(config: Config, serving: Served, stop: StopSignal, manager: ServiceManager, until_stopped: ExitStack) -> None:
    """Serve until a reason to stop, which is logged; `until_stopped` ends when all is closed."""
    daemon, storage = serving.daemon, serving.control.storage
    lease = storage.lease
    activity, presence = Activity(), RootPresence(config.place.directory)
    with ExitStack() as stack:
        if serving.listener is not None and serving.edge is not None:
            stack.enter_context(_http(serving.listener, serving.edge, activity, stop))
        manager.ready(f"serving {config.place.label}")
        gc_tuning.settle()
        while (reason := stop.wait(IDLE_CHECK_S)) is None:
            if daemon.busy or serving.runner.busy:
                activity.touch()
            daemon.saver.unwritten()  # takes the lock of the saves: a daemon that is stuck with it is not alive
            manager.alive()
            if lease is not None and (reason := lease.lost(daemon.busy or daemon.ranks > 0)):
                break
            if config.exit_when_idle is None:
                continue
            if activity.idle_s > config.exit_when_idle:
                reason = f"idle for {activity.idle_s:.0f} s"
                break
            # What is still to be saved or checked cannot be, without the root, and would keep this daemon for ever.
            if presence.gone_s > ROOT_GONE_S and not daemon.ranks:
                log.error("%s has been gone for %.0f s, and no rank is connected", config.place.directory, ROOT_GONE_S)
                reason = f"{config.place.directory} is gone"
                break
        log.info("%s: the daemon stops", reason)
        until_stopped.enter_context(StopReport(manager, daemon.saver.unwritten, storage.traffic))


@contextmanager
def _http(listener: socket.socket, edge: Edge, activity: Activity, stop: StopSignal) -> Iterator[None]:
    """Run the REST edge in its own thread, so that the main thread stays free for signals."""
    from holdfast_service.api.access.connections import server as bounded
    from holdfast_service.api.app import RestApi

    services = edge.services
    app = RestApi(services, edge.wings)

    async def noticed(scope, receive, send):  # type: ignore[no-untyped-def]
        activity.touch()
        await app(scope, receive, send)

    server = bounded(noticed)

    def run() -> None:
        try:
            server.run(sockets=[listener])
        finally:
            stop.set("the HTTP server has ended")

    thread = threading.Thread(target=run, name="holdfast-http", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        services.control.events.hang_up()  # wakes up requests that wait for an event, as well as
        services.remote.close()  # requests that wait for an outcome, which would delay the server's end
        thread.join(timeout=10)
        services.audit.close()


if __name__ == "__main__":
    sys.exit(main())
