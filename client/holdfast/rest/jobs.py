"""Jobs and events over the REST API, a part of `Api`. Event streams reconnect by themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from typing import Any, NamedTuple, Protocol, TypeVar

import httpx
from pydantic import BaseModel

from holdfast.rest import bounded
from holdfast_formats.errors import DeadlineExceeded, Unavailable
from holdfast_formats.rest.jobs import JobRequest
from holdfast_formats.rest.operations import Event, Gap, Job
from holdfast_formats.timestamps import check_seconds

POLL_S = 20.0
QUIET_MAX_S = 60.0  # the service sends something every 15 s: a stream that is silent for longer is broken
RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)
PATIENCE_S = 300.0
_ENDED = ("done", "failed", "cancelled")
_FIELDS = ("id", "event", "data")
Model = TypeVar("Model", bound=BaseModel)


class ApiConnection(Protocol):
    """What the parts of `Api` have in common."""

    _http: httpx.Client

    def request(self, method: str, path: str, **parts: Any) -> httpx.Response: ...
    def parsed(self, content: bytes, model: type[Model]) -> Model: ...
    def _checked(self, response: httpx.Response) -> httpx.Response: ...
    def _translated(self) -> AbstractContextManager[None]: ...
    def _pages(self, path: str, item: type[Model], query: Mapping[str, str | None] | None = None) -> Iterator[Model]: ...
    def job(self, job_id: int, wait_s: float = 0.0) -> Job: ...


class EventFrame(NamedTuple):
    """One server-sent event: its position in the stream, its kind, its data; the data is empty in a heartbeat."""

    id: str | None
    kind: str
    data: str


class JobsApi:
    """The routes of jobs and events."""

    def submit_job(self: ApiConnection, wanted: JobRequest) -> Job:
        """Submit a job, or return the identical one that is queued or running. Invalid requests are refused at once."""
        headers = {"Content-Type": "application/json"}
        with self._translated():
            answer = self.request("POST", "/v1/jobs", content=wanted.model_dump_json().encode(), headers=headers)
            return self.parsed(answer.content, Job)

    def job(self: ApiConnection, job_id: int, wait_s: float = 0.0) -> Job:
        """The progress of a job; waits up to `wait_s` (at most 20) for its end. `NoSuchResource`."""
        with self._translated():
            return self.parsed(self.request("GET", f"/v1/jobs/{job_id}", params={"wait_s": wait_s}).content, Job)

    def jobs(
        self: ApiConnection, kind: str | None = None, state: str | None = None, run: str | None = None
    ) -> Iterator[Job]:
        """Jobs, newest first."""
        return self._pages("/v1/jobs", Job, {"kind": kind, "state": state, "run": run})

    def cancel_job(self: ApiConnection, job_id: int) -> Job:
        """Ask a job to stop, and return its state; a job that has ended stays as it ended."""
        self.request("DELETE", f"/v1/jobs/{job_id}")
        return self.job(job_id)

    def wait_job(self: ApiConnection, job_id: int, timeout_s: float | None = None) -> Job:
        """Wait until the job has ended, and return it, whether it succeeded or not; `DeadlineExceeded` after `timeout_s`."""
        check_seconds(timeout_s, "timeout_s")
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = POLL_S if until is None else until - time.monotonic()
            job = self.job(job_id, min(max(left_s, 0.0), POLL_S))
            if job.state in _ENDED:
                return job
            if left_s <= 0:
                raise DeadlineExceeded(
                    f"job {job_id} is still {job.state} after {timeout_s} s", hint="the job continues in the service"
                )

    def events(
        self: ApiConnection,
        after: int | None = None,
        run: str | None = None,
        kind: str | None = None,
        on_gap: Callable[[Gap], None] = lambda gap: None,
        patience_s: float = PATIENCE_S,
    ) -> Iterator[Event]:
        """Events after the id `after`, else from now on, as they happen, without end.

        A broken connection is made again, without losing or repeating events. `on_gap` is called if the service no
        longer has requested events. Raises the service's refusals, and `Unavailable` if it cannot be reached for
        `patience_s`.
        """
        asked = {"run": run, "kind": kind, "after": None if after is None else str(after)}
        params = {name: value for name, value in asked.items() if value is not None}
        last: str | None = None
        tries, away_since = 0, None
        while True:
            headers = {"Accept": "text/event-stream"} | ({} if last is None else {"Last-Event-ID": last})
            try:
                for frame in _frames(self, headers, params):
                    tries, away_since, last = 0, None, frame.id or last
                    if frame.kind == "gap":
                        on_gap(self.parsed(frame.data.encode(), Gap))
                    elif frame.data:
                        yield self.parsed(frame.data.encode(), Event)
            except Unavailable:
                away_since = away_since or time.monotonic()  # not since the last frame: a stream may be quiet for long
                if last is None or time.monotonic() - away_since > patience_s:
                    raise
            time.sleep(RETRY_S[min(tries, len(RETRY_S) - 1)])
            tries += 1


def _frames(api: ApiConnection, headers: Mapping[str, str], params: Mapping[str, str]) -> Iterator[EventFrame]:
    """The frames of one connection, until it ends or breaks (`DaemonGone`); an incomplete frame at its end is ignored."""
    timeout = httpx.Timeout(QUIET_MAX_S, connect=5.0)
    asked = api._http.build_request(
        "GET", "/v1/events", headers=headers, params=params, timeout=timeout, extensions={bounded.BYTES_MAX: None}
    )
    with api._translated(), closing(api._http.send(asked, stream=True)) as answer:
        if answer.is_error:
            answer.read()
        api._checked(answer)
        fields: dict[str, str] = {}
        for line in bounded.lines(answer):
            if line:
                name, _, value = line.partition(":")
                fields[name if name in _FIELDS else ""] = value.removeprefix(" ")
            elif fields:
                yield EventFrame(fields.get("id"), fields.get("event", "message"), fields.get("data", ""))
                fields = {}
