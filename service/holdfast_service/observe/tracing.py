"""Optional tracing: active if OTEL_* sets an endpoint and the OpenTelemetry SDK is installed.

Other code calls `span` for work in progress and `record` for finished, measured work. Without tracing both cost
only a look at one variable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

NANOSECONDS = 1_000_000_000
Attributes = Mapping[str, Any]
EventRecorder = Callable[..., None]
NOTHING: Attributes = MappingProxyType({})


class SpanPart(NamedTuple):
    """A finished time span, in seconds since the epoch."""

    name: str
    began: float
    ended: float
    attributes: Attributes = NOTHING


class Tracer(Protocol):
    @contextmanager
    def span(self, name: str, headers: Iterable[tuple[bytes, bytes]], attributes: Attributes) -> Iterator[EventRecorder]:
        yield _ignore

    def record(self, whole: SpanPart, parts: Iterable[SpanPart], error: str | None) -> None: ...
    def close(self) -> None: ...


_tracer: Tracer | None = None


def trace_with(tracer: Tracer) -> Callable[[], None]:
    """Send spans to `tracer` until the returned function is called, which closes it."""
    global _tracer
    _tracer = tracer

    def end() -> None:
        global _tracer
        _tracer = None
        tracer.close()

    return end


def tracing() -> bool:
    """Whether tracing is active."""
    return _tracer is not None


@contextmanager
def span(
    name: str, attributes: Attributes = NOTHING, headers: Iterable[tuple[bytes, bytes]] = ()
) -> Iterator[EventRecorder]:
    """Trace the block, under the span in `headers` (traceparent) or of the calling code; the result adds attributes."""
    if _tracer is None:
        yield _ignore
        return
    with _tracer.span(name, headers, attributes) as tell:
        yield tell


def record(whole: SpanPart, parts: Iterable[SpanPart] = (), error: str | None = None) -> None:
    """Record a finished span and its parts; `error` is its error code, if it failed."""
    if _tracer is not None:
        _tracer.record(whole, parts, error)


def _ignore(**attributes: Any) -> None:
    pass
