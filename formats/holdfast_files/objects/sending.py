"""Signs, sends, repeats and counts requests to one bucket."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from http.client import HTTPResponse
from threading import Event
from typing import NamedTuple, TypeVar
from urllib.parse import quote

from holdfast_files.objects import refusals
from holdfast_files.objects.answers import ERROR_BYTES_MAX, Malformed
from holdfast_files.objects.connections import Connections, LostAnswer, Outgoing, read_whole
from holdfast_files.objects.keys import Keys
from holdfast_files.objects.refusals import Attempted, Refusal
from holdfast_files.objects.settings import BucketSettings
from holdfast_files.objects.traffic import RequestCount, Traffic
from holdfast_formats.errors import CheckpointError, StorageFailed
from holdfast_formats.timestamps import write

PAUSE_FIRST_S = 0.2
PAUSE_MAX_S = 10.0
OF_SAVES = ("put", "begin", "part", "complete", "copy", "head")
_UNESCAPED = "~-._"  # what a query has as it is, and a path beside its slashes: signatures want all else escaped

T = TypeVar("T")


class ObjectRequest(NamedTuple):
    """One request: its kind as counters name it, and the whole key, empty for the bucket's own."""

    kind: str
    method: str
    key: str = ""
    query: Sequence[tuple[str, str]] = ()
    headers: Mapping[str, str] = {}
    body: Sequence[memoryview] | None = None
    silence_s: float = 0.0  # 0: the usual


class Patience(NamedTuple):
    """For how long what is safe to repeat is repeated, what a pause of an answer may last, and what counts requests."""

    retry_s: float
    silence_s: float
    traffic: Sequence[Traffic]


class Unsettled(Exception):
    """A request that must not be repeated may have been carried out, or not: its answer was lost."""


class Sender:
    """Requests to one bucket. Safe for threads."""

    def __init__(self, bucket: str, settings: BucketSettings, keys: Keys) -> None:
        self.settings, self.keys, self._bucket = settings, keys, bucket
        self._connections = Connections(settings.endpoint)
        self._closed = Event()
        self._carried_out = set[str]()  # kinds of requests: what they lack later is waited for
        self.bare_tags = Event()  # set where the server knows tags in conditions without their quotes only

    def close(self) -> None:
        """End waits between repetitions, and close connections."""
        self._closed.set()
        self._connections.close()

    def url(self, key: str, query: Sequence[tuple[str, str]] = ()) -> str:
        return f"{self.settings.endpoint.url}{self._target(key, query)}"

    def ask(
        self,
        request: ObjectRequest,
        take: Callable[[HTTPResponse], T | Refusal],
        patience: Patience,
        label: str,
        once: bool = False,
    ) -> T | Refusal:
        """What `take` makes of an answer 2xx, or the refusal. What failed in passing is repeated while patience lasts.

        With `once`, a request that may have been carried out is not repeated, but raises `Unsettled`, as it does for an
        answer that settles nothing. `StorageFailed` if nothing answers, or not as S3 does.
        """
        end = time.monotonic() + patience.retry_s
        tries = 0
        failed: Refusal | None
        failure: CheckpointError
        while True:
            try:
                answer = self._once(request, take, patience, tries > 0)
            except Malformed as error:
                if once:
                    raise Unsettled(f"a strange answer: {error}") from error
                raise refusals.strange(str(error), self.asked(request, label)) from error
            except LostAnswer as cut:
                _settle(patience, request, f"no answer: {cut}", passes=True)
                if once and cut.body_sent:
                    raise Unsettled(f"no answer: {cut}") from cut
                failed, failure = None, self._unreachable(cut, request, label)
            else:
                if not isinstance(answer, Refusal):
                    self._carried_out.add(request.kind)
                    _settle(patience, request)
                    return answer
                _settle(patience, request, "" if answer.is_usual else answer.shown, answer.is_transient)
                if once and answer.is_unsettled:
                    raise Unsettled(answer.shown)
                if not answer.is_transient and not self._may_come_back(answer, request.kind):
                    return answer
                failed, failure = answer, refusals.error(answer, self.asked(request, label))
            tries += 1
            if not self._paused(tries, failed, end):
                raise _lasting(failure, request, patience)

    def asked(self, request: ObjectRequest, label: str) -> Attempted:
        return Attempted(label, self._bucket, request.kind, self.settings.region, time.time())

    def _may_come_back(self, answer: Refusal, kind: str) -> bool:
        """Whether it is refused for keys, a permission or room that there was before. What only reads is not waited for."""
        if answer.code in refusals.ENDED_KEYS:
            return self.keys.reload() or bool(self._carried_out)
        if kind not in OF_SAVES or kind not in self._carried_out:
            return False
        if answer.code in refusals.DENIALS:
            self.keys.reload()
            return True
        return answer.is_full

    def _paused(self, tries: int, answer: Refusal | None, end: float) -> bool:
        """Pause at random, for longer each time; False where patience would end meanwhile."""
        pause = random.uniform(0, min(PAUSE_MAX_S, PAUSE_FIRST_S * 2**tries))
        if answer is not None and answer.retry_after.isdecimal():
            pause = max(pause, min(float(answer.retry_after), PAUSE_MAX_S))
        return time.monotonic() + pause <= end and not self._closed.wait(pause)

    def _once(
        self, request: ObjectRequest, take: Callable[[HTTPResponse], T | Refusal], patience: Patience, again: bool
    ) -> T | Refusal:
        received = 0

        def taken(response: HTTPResponse) -> T | Refusal:
            nonlocal received
            received = max(response.length or 0, 0)
            if response.status // 100 == 2:
                return take(response)
            body = read_whole(response, ERROR_BYTES_MAX)
            return refusals.read(response.status, response.headers, body)

        headers = {**request.headers, "Host": self.settings.host}
        url = self.url(request.key, request.query)
        signed = self.keys.signed(request.method, url, headers)
        target = self._target(request.key, request.query)
        silence_s = request.silence_s or patience.silence_s
        sent = sum(view.nbytes for view in request.body or ())
        try:
            return self._connections.exchange(Outgoing(request.method, target, signed, request.body, silence_s), taken)
        finally:
            for traffic in patience.traffic:
                traffic.add(request.kind, RequestCount(1, int(again), sent, received), request.key)

    def _unreachable(self, cut: LostAnswer, request: ObjectRequest, label: str) -> StorageFailed:
        return refusals.unreachable(cut.cause, self.asked(request, label), self.settings.endpoint.url)

    def _target(self, key: str, query: Sequence[tuple[str, str]]) -> str:
        path = f"{self.settings.path}/{quote(key, safe=f'/{_UNESCAPED}')}" if key else self.settings.path or "/"
        if not query:
            return path
        return (
            f"{path}?{'&'.join(f'{quote(name, safe=_UNESCAPED)}={quote(value, safe=_UNESCAPED)}' for name, value in query)}"
        )


def _lasting(failure: CheckpointError, request: ObjectRequest, patience: Patience) -> CheckpointError:
    """The failure of a request that was repeated in vain, with the time since when all of its kind fail."""
    since = [at for one in patience.traffic if (at := one.failing_since(request.kind)) is not None]
    if since:
        first = write(datetime.fromtimestamp(min(since), timezone.utc))
        failure.detail = f"{failure.detail}; the bucket fails {request.kind} requests since {first}"
    return failure


def _settle(patience: Patience, request: ObjectRequest, failure: str = "", passes: bool = False) -> None:
    for traffic in patience.traffic:
        traffic.settle(request.kind, failure, passes)
