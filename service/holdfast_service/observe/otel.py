"""OpenTelemetry spans. Imported only by `tracing`, and only if the SDK is installed and configured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from holdfast_service.observe.tracing import NANOSECONDS, Attributes, EventRecorder, SpanPart

SCOPE = "holdfast"
SERVICE = "holdfast"
_EXPORTERS = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
)


class OtelTracer:
    """Passes spans to a processor. The SDK reads the OTEL_* variables for endpoint, sampling and batching."""

    def __init__(self, processor: SpanProcessor, node: str, version: str) -> None:
        about = {"service.name": SERVICE, "service.version": version, "service.instance.id": node, "holdfast.node": node}
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence.
        self._provider = TracerProvider(resource=Resource(about).merge(OTELResourceDetector().detect()))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(SCOPE, version)
        self._incoming = TraceContextTextMapPropagator()

    @contextmanager
    def span(self, name: str, headers: Iterable[tuple[bytes, bytes]], attributes: Attributes) -> Iterator[EventRecorder]:
        carrier = {key.decode("latin-1"): value.decode("latin-1") for key, value in headers if key.startswith(b"trace")}
        context = self._incoming.extract(carrier) if carrier else None
        kind = SpanKind.SERVER if headers else SpanKind.INTERNAL
        with self._tracer.start_as_current_span(name, context, kind, attributes=_plain(attributes)) as current:

            def tell(**more: Any) -> None:
                current.set_attributes(_plain(more))

            yield tell

    def record(self, whole: SpanPart, parts: Iterable[SpanPart], error: str | None) -> None:
        span = self._tracer.start_span(whole.name, attributes=_plain(whole.attributes), start_time=_ns(whole.began))
        inside = trace.set_span_in_context(span)
        for part in parts:
            child = self._tracer.start_span(
                part.name, inside, attributes=_plain(part.attributes), start_time=_ns(part.began)
            )
            child.end(_ns(part.ended))
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(_ns(whole.ended))

    def close(self) -> None:
        self._provider.shutdown()


def exporting(node: str, version: str) -> OtelTracer | None:
    """A tracer with the endpoint of the OTEL_* variables and the installed OTLP exporter; None without one."""
    for name in _EXPORTERS:
        if _there(name):
            exporter: SpanExporter = import_module(name).OTLPSpanExporter()
            return OtelTracer(BatchSpanProcessor(exporter), node, version)
    return None


def _there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a package that is not there itself
        return False


def _ns(seconds: float) -> int:
    return round(seconds * NANOSECONDS)


def _plain(attributes: Attributes) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}
