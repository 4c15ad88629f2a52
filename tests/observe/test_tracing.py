"""Traces: real saves, restores, jobs and requests become spans; without the SDK or an endpoint nothing happens."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from holdfast_formats.timestamps import seconds_of
from holdfast_service.config import otel_environment
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.control import Control
from holdfast_service.control.database.schema import JobRow
from holdfast_service.control.insight.round_history import RoundHistory
from holdfast_service.control.insight.spans import JobSpans
from holdfast_service.observe import tracing
from holdfast_service.storage import PosixTier, stored_in
from holdfast_service.wiring import watching
from holdfast_service.wiring.watching import Watcher
from tests.checkpoints import build_root
from tests.control.published import a_row
from tests.databases import sqlite_catalog
from tests.serving import served

pytest.importorskip("opentelemetry.sdk", reason="the OpenTelemetry SDK is not installed (the extra `otel`)")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from holdfast_service.observe.otel import OtelTracer

BEGAN, ENDED = "2030-01-01T00:00:00.000Z", "2030-01-01T00:00:10.000Z"
PHASES = {"stage_s": 1.0, "queue_s": 0.5, "write_s": 6.0, "fsync_s": 2.0, "commit_s": 0.25, "verify_s": 3.0, "stall_s": 0.1}


@pytest.fixture
def exported() -> Iterator[InMemorySpanExporter]:
    """Where spans go for the length of a test."""
    exporter = InMemorySpanExporter()
    end = tracing.trace_with(OtelTracer(SimpleSpanProcessor(exporter), "node-1", "9.9"))
    yield exporter
    end()


catalog = sqlite_catalog


def spans(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def seconds(span: ReadableSpan) -> tuple[float, float]:
    """Begin and end, in seconds after the save began."""
    began = seconds_of(BEGAN)
    return round((span.start_time or 0) / 1e9 - began, 3), round((span.end_time or 0) / 1e9 - began, 3)


def test_save_and_its_phases(catalog: Catalog, exported: InMemorySpanExporter) -> None:
    """One trace a save: phases in their order, fsync at the end of writing, verifying after the commit."""
    history = RoundHistory(catalog.database, "node-1")
    watcher = Watcher(history, JobSpans(catalog.database, "node-1"), look_s=0.01)
    made = catalog.rounds.open("llama", 5, 3, 8, BEGAN)[0]
    catalog.record_checkpoint(a_row("llama", 5))
    catalog.node = "node-1"
    catalog.rounds.end(made, "committed", ENDED, **PHASES)
    failed = catalog.rounds.open("llama", 6, 3, 8, BEGAN)[0]
    catalog.rounds.end(failed, "aborted", ENDED, "no-space", "full")
    watcher.close()
    found = [span for span in exported.get_finished_spans() if span.attributes["holdfast.step"] == 5]  # type: ignore[index]
    by_name = {span.name.removeprefix("holdfast.save"): span for span in found}
    assert {name: seconds(span) for name, span in by_name.items()} == {
        "": (0, 13),
        ".stage": (0, 1),
        ".queue": (1, 1.5),
        ".write": (1.5, 7.5),
        ".fsync": (5.5, 7.5),
        ".commit": (7.5, 7.75),
        ".verify": (10, 13),
    }
    assert len({span.context.trace_id for span in found}) == 1  # type: ignore[union-attr]
    whole = by_name[""]
    assert (whole.attributes or {})["holdfast.run"] == "llama" and (whole.attributes or {})["holdfast.stall_s"] == 0.1
    assert (whole.resource.attributes["service.name"], whole.resource.attributes["holdfast.node"]) == ("holdfast", "node-1")
    (other,) = [span for span in exported.get_finished_spans() if span not in found]
    assert (other.status.description, other.status.is_ok) == ("no-space", False)


def test_jobs(catalog: Catalog, exported: InMemorySpanExporter) -> None:
    """A job of this node is a span from its start to its end; another node's is that node's."""
    jobs = JobSpans(catalog.database, "node-1")
    jobs.update()
    with catalog.database.write() as session:
        for number, node in enumerate(("node-1", "node-2")):
            values = {
                "kind": "verify",
                "key": str(number),
                "state": "running",
                "run": "llama",
                "step": 5,
                "request": {},
                "tries": 1,
            }
            times = {"created": BEGAN, "started": BEGAN, "ended": None, "cancel": False, "done_bytes": 7, "total_bytes": 7}
            session.add(JobRow(node=node, **values, **times))
    jobs.update()
    assert exported.get_finished_spans() == ()
    with catalog.database.write() as session:
        for row in session.query(JobRow):
            row.end("failed", ENDED, problem={"code": "corrupt-extent"})
    jobs.update()
    jobs.update()
    (span,) = exported.get_finished_spans()
    assert (span.name, seconds(span), span.status.description) == ("holdfast.job", (0, 10), "corrupt-extent")


def test_requests_and_restores(tmp_path: Path, exported: InMemorySpanExporter) -> None:
    """A request is a span under its caller's, with the route and not the path; a restore says which step was chosen."""
    build_root(tmp_path, {"tiny": (5,)})
    caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with served(tmp_path) as service:
        path = f"{service.url}/v1/runs/tiny/checkpoints/5"
        httpx.get(path, headers={"traceparent": caller}, trust_env=False).raise_for_status()
    control = Control(stored_in(PosixTier(tmp_path)), service.services.control.catalog, None)
    assert control.restores.choose("tiny", 1, 0, None, ()) == 5
    control.close()
    found = spans(exported)
    request, restore = found["holdfast.request"], found["holdfast.restore"]
    assert f"{request.context.trace_id:032x}" == caller[3:35]  # type: ignore[union-attr]
    assert (request.attributes or {})["http.route"] == "/v1/runs/{run}/checkpoints/{step}"
    assert (request.attributes or {})["holdfast.run"] == "tiny"
    assert (request.attributes or {})["http.response.status_code"] == 200
    assert (restore.attributes or {})["holdfast.step"] == 5


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_SERVICE_NAME": "holdfast"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_nothing_is_traced_unasked(environment: dict[str, str]) -> None:
    """Only an endpoint asks for spans, and the SDK's own switches turn it off."""
    watching.start_tracing(environment, "node-1")()
    assert not tracing.tracing()


def test_without_the_sdk(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An endpoint without the SDK is a warning that says what to install."""
    monkeypatch.setattr(watching, "find_spec", lambda name: None)
    watching.start_tracing({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, "node-1")()
    assert "[otel]" in caplog.text and not tracing.tracing()


def test_an_endpoint_starts_tracing() -> None:
    """With endpoint, SDK and exporter spans are taken until the end."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="no OTLP exporter is installed")
    with ExitStack() as stack:
        stack.callback(watching.start_tracing({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9"}, "node-1"))
        assert tracing.tracing()
    assert not tracing.tracing()


def test_untraced_code_imports_nothing() -> None:
    """Who does not trace does not pay: the seam imports no SDK, and a span is nothing."""
    assert "opentelemetry" not in Path(tracing.__file__).read_text().replace("OpenTelemetry", "")
    assert "holdfast_service.observe.tracing" in sys.modules
    with tracing.span("nothing", {"run": "x"}) as tell:
        tell(more=1)
    tracing.record(tracing.SpanPart("nothing", 0, 1))


def test_environment_is_read_by_config() -> None:
    """Only OTEL_* is looked at."""
    assert otel_environment({"OTEL_SERVICE_NAME": "a", "HOLDFAST_ROOT": "b"}) == {"OTEL_SERVICE_NAME": "a"}
