"""Wires observation: logs, the history of saves, and traces of them if a collector is configured."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from importlib.util import find_spec

from holdfast_formats.errors import CatalogUnavailable, CheckpointError
from holdfast_formats.installing import install
from holdfast_service import __version__
from holdfast_service.config import Config, otel_environment
from holdfast_service.control.database.database import Database
from holdfast_service.control.insight.round_history import RoundHistory
from holdfast_service.control.insight.spans import JobSpans, SaveSpans
from holdfast_service.observe import tracing

log = logging.getLogger(__name__)

LOOK_S = 2.0


def watch(config: Config, database: Database, stack: ExitStack) -> RoundHistory:
    """The history of this node's saves, traced until `stack` unwinds if OTEL_* says so."""
    history = RoundHistory(database, config.node)
    with suppress(CatalogUnavailable):
        history.update()  # from here on
    stack.callback(start_tracing(otel_environment(), config.node))
    if tracing.tracing():
        watcher = Watcher(history, JobSpans(database, config.node))
        stack.callback(watcher.close)
    return history


def start_tracing(environment: Mapping[str, str], node: str) -> Callable[[], None]:
    """Trace if OTEL_* sets a collector and the SDK is installed; the returned function flushes and stops."""
    wanted = any(environment.get(f"OTEL_EXPORTER_OTLP_{kind}ENDPOINT") for kind in ("", "TRACES_"))
    off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none"
    if not wanted or off:
        return lambda: None
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None:
        log.warning("OTEL_* sets an endpoint for spans, but the OpenTelemetry SDK is not installed: %s", install("otel"))
        return lambda: None
    from holdfast_service.observe.otel import exporting

    tracer = exporting(node, __version__)
    if tracer is None:
        log.warning("OTEL_* sets an endpoint for spans, but no OTLP exporter is installed: %s", install("otel"))
        return lambda: None
    return tracing.trace_with(tracer)


class Watcher:
    """A thread that turns saves and jobs into spans as they end."""

    def __init__(self, history: RoundHistory, jobs: JobSpans, look_s: float = LOOK_S) -> None:
        self._history, self._jobs, self._look_s = history, jobs, look_s
        self._saves = SaveSpans()
        history.seen.subscribe(self._saves.hear)
        self._look()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-watcher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Trace what has ended so far, then stop."""
        self._closing.set()
        self._thread.join()
        self._look()
        self._saves.flush(all_of_them=True)

    def _run(self) -> None:
        while not self._closing.wait(self._look_s):
            try:
                self._look()
                self._saves.flush()
            except Exception:  # the next look tries again
                log.exception("saves are not traced")

    def _look(self) -> None:
        try:
            self._history.update()
            self._jobs.update()
        except CheckpointError as error:  # the catalog reports this elsewhere; the next look covers what this one missed
            log.warning("saves are not traced: %s", error.detail)
