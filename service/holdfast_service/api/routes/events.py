"""Routes: events as a resumable stream (server-sent events) or in pages."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Depends, Header, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response, StreamingResponse

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest import bodies
from holdfast_formats.rest.operations import EVENTS, Event, Gap
from holdfast_service.api import problems
from holdfast_service.api.access.admission import ConcurrencyLimit
from holdfast_service.api.access.authorization import needs
from holdfast_service.api.content.delivery import weights
from holdfast_service.api.content.event_wait import listening
from holdfast_service.api.services import Cursor, Limit, Wired
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.catalog.pages import INTEGER_MAX

MEDIA_TYPE = "text/event-stream"
HEARTBEAT_S = 15.0
READ_MAX = 500  # events that are read at once
STREAMS_MAX = 64
STREAM_WAIT_MAX_S = 5.0

router = APIRouter(prefix="/v1", tags=["events"], responses=problems.RESPONSES)
Id = Annotated[int, Query(ge=0, le=INTEGER_MAX)]


class WantedEvents(NamedTuple):
    """Filter of a stream: events after an ID (None: only new ones), of one run or one kind."""

    after: int | None
    run: str | None
    kind: str | None


class EventStreams:
    """Open event streams and their limit."""

    def __init__(self, events: Events, streams_max: int = STREAMS_MAX) -> None:
        self._events, self._streams_max = events, streams_max
        self._limit = ConcurrencyLimit(lambda: streams_max)

    async def body(self, wanted: WantedEvents) -> AsyncGenerator[str, None]:
        """Yield frames until the service shuts down or the client disconnects; the first frame has the start
        position.

        Raises `DeadlineExceeded` if too many other streams are open.
        """
        full = f"{self._streams_max} event streams are open, or too many for this token or address"
        hint = "try again later, or leave out Accept: text/event-stream to get pages of events"
        async with self._limit.awaited(STREAM_WAIT_MAX_S, full, hint):
            with listening(self._events) as listener:
                now = await run_in_threadpool(self._events.bounds)
                position = now[1] if wanted.after is None else wanted.after
                yield _heartbeat(position)
                sent_at = time.monotonic()
                while not self._events.hung_up:
                    frames, position, more = await run_in_threadpool(self._read, wanted, position)
                    if frames:
                        yield frames
                        sent_at = time.monotonic()
                    elif time.monotonic() - sent_at >= HEARTBEAT_S:
                        yield _heartbeat(position)
                        sent_at = time.monotonic()
                    if not more:
                        await listener.wait(max(sent_at + HEARTBEAT_S - time.monotonic(), 0.01))

    def _read(self, wanted: WantedEvents, position: int) -> tuple[str, int, bool]:
        """Frames after `position`, the new position of the stream, and whether there may be more already."""
        found = self._events.following(position, READ_MAX, wanted.run, wanted.kind)
        frames: list[str] = []
        if position > found.newest:  # the catalog was rebuilt, and counts from the beginning again
            frames.append(_gap(Gap(asked=position, oldest=found.oldest)))
            position = max(found.oldest - 1, 0)
            return "".join(frames), position, found.newest > position
        if position < found.forgotten:  # of others, older ones may be kept
            oldest = max(found.oldest or found.forgotten + 1, position + 1)
            frames.append(_gap(Gap(asked=position, oldest=oldest)))
            position = oldest - 1 if found.events else max(oldest - 1, found.forgotten)
        events = [event for event in found.events if event.id > position]
        frames += [_frame(event) for event in events]
        full = len(found.events) == READ_MAX
        last = events[-1].id if events else position
        return "".join(frames), last if full else max(last, found.newest), full


def _asked(
    after: Annotated[Id | None, Query(description="only events after this ID; a stream starts with the next one")] = None,
    run: Annotated[str | None, Query(description="only events of this run")] = None,
    kind: Annotated[str | None, Query(description="only events of this kind")] = None,
    last_event_id: Annotated[
        str | None, Header(description="the last event received, to resume a broken stream; takes precedence over `after`")
    ] = None,
) -> WantedEvents:
    if kind is not None and kind not in EVENTS:
        raise InvalidRequest(f"{kind!r} is not a kind of event", hint=f"one of {', '.join(EVENTS)}")
    return WantedEvents(_parse_id(last_event_id) if last_event_id else after, run, kind)


Asked = Annotated[WantedEvents, Depends(_asked)]


@router.get(
    "/events",
    dependencies=needs("read"),
    summary="Events: a live stream with `Accept: text/event-stream`, otherwise a page, newest first",
    response_model=bodies.Page[Event],
    responses={200: {"description": "A page, or a stream", "content": {MEDIA_TYPE: {"schema": {"type": "string"}}}}},
)
async def get_events(
    request: Request, services: Wired, wanted: Asked, cursor: Cursor = None, limit: Limit = 100
) -> Response:
    """A stream starts with new events, unless `after` or `Last-Event-ID` gives a position.

    An `event: gap` means that events at the start are no longer stored; it contains the oldest stored ID. It is about
    events that the token may see alone.
    """
    accepted = weights(request.headers.get("accept", ""))
    if accepted.get(MEDIA_TYPE, 0.0) <= accepted.get("application/json", 0.0):
        read = services.control.events.newest
        page = await run_in_threadpool(read, cursor, limit, wanted.run, wanted.kind, wanted.after or 0)
        return JSONResponse(page.model_dump(), headers={"Vary": "Accept"})
    streams: EventStreams = request.app.state.event_streams
    body = streams.body(wanted)
    first = await anext(body)
    headers = {"Cache-Control": "no-store", "Vary": "Accept", "X-Accel-Buffering": "no"}
    return StreamingResponse(_all(first, body), media_type=MEDIA_TYPE, headers=headers)


async def _all(first: str, rest_of_it: AsyncGenerator[str, None]) -> AsyncIterator[str]:
    try:
        yield first
        async for frames in rest_of_it:
            yield frames
    finally:
        await rest_of_it.aclose()


def _parse_id(header: str) -> int:
    if not (header.isascii() and header.isdigit() and len(header) <= 19 and int(header) <= INTEGER_MAX):
        raise InvalidRequest(f"Last-Event-ID {header!r} is not an event ID")
    return int(header)


def _frame(event: Event) -> str:
    return f"id: {event.id}\nevent: {event.kind}\ndata: {event.model_dump_json()}\n\n"


def _gap(gap: Gap) -> str:
    return f"id: {max(gap.oldest - 1, 0)}\nevent: gap\ndata: {gap.model_dump_json()}\n\n"


def _heartbeat(position: int) -> str:
    """A comment, and an ID without data, which is not an event but the position from which a broken stream
    resumes.
    """
    return f": \nid: {position}\n\n"
