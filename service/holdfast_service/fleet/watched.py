"""Watches other daemons over their REST API: what they say of their runs, and since when one cannot be reached.

Nothing is stored: a daemon that is started again knows what it has asked since. The addresses come from the command line,
and a token is sent to its own address alone; no redirect is followed.
"""

from __future__ import annotations

import logging
import os
import random
import stat
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.moments import utc_now
from holdfast_formats.rest import bodies
from holdfast_formats.rest.observed import Attention, RunSummary
from holdfast_formats.rest.telling import WatchedDaemon, WatchedRun
from holdfast_service.fleet.connecting import cause, trusting

log = logging.getLogger(__name__)

ASK_S = 5.0  # how often each daemon is asked
TIMEOUT_S = 5.0  # for each step of an answer,
ANSWER_S = 30.0  # and for a whole one
ANSWER_BYTES_MAX = 32 * 1024 * 1024
RUNS_MAX = 5000  # of one daemon
PAGE_RUNS = 500
DAEMONS_MAX = 256
UNREACHABLE_S = 30.0  # an alert tells of it after so long
CLOSE_S = 3.0
TOKENS_BYTES_MAX = 256 * 1024

Model = TypeVar("Model", bound=BaseModel)


class _NotReached(Exception):
    """Why a daemon could not be asked, in words without secrets."""


class _Said(NamedTuple):
    """What a daemon said last."""

    version: str | None = None
    summaries: tuple[RunSummary, ...] = ()
    ranks: int = 0
    asked: str | None = None


class _State(NamedTuple):
    said: _Said = _Said()
    problem: str | None = "it has not been asked yet"
    since: str | None = None  # unreachable
    since_s: float | None = None  # the same by the monotonic clock


class Watch:
    """The daemons at some addresses, each asked in a thread of its own. Thread-safe."""

    def __init__(self, urls: Sequence[str], tokens: Mapping[str, str], ca: Path | None = None, ask_s: float = ASK_S) -> None:
        """Raises `InvalidRequest` for an address that is none, or a token for an address that is not watched."""
        if len(urls) > DAEMONS_MAX:
            raise InvalidRequest(f"--watch: at most {DAEMONS_MAX} daemons", hint="leave some out")
        self.urls = tuple(dict.fromkeys(check_address(url) for url in urls))
        unknown = next((url for url in tokens if url not in self.urls), None)
        if unknown is not None:
            raise InvalidRequest(
                f"--watch-tokens has a token for {unknown}, which is not watched", hint="add --watch, or remove it"
            )
        self._tokens, self._trust, self._ask_s = tokens, trusting(ca), ask_s
        self._lock = threading.Lock()
        self._states = {url: _State() for url in self.urls}
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(url,), name=f"holdfast-watch-{_name(url)}", daemon=True)
            for url in self.urls
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._closing.set()
        limit = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(limit - time.monotonic(), 0.0))

    def daemons(self, sees: Iterable[str] | None = None) -> list[WatchedDaemon]:
        """All watched daemons, those that need a person first. `sees`: for somebody who may see these runs only, and is told
        of those daemons alone that have one of them.
        """
        seen = None if sees is None else frozenset(sees)
        with self._lock:
            states = dict(self._states)
        found = []
        for url, state in states.items():
            summaries = [one for one in state.said.summaries if seen is None or one.run in seen]
            if seen is None or summaries:
                found.append(_daemon(url, state, summaries, whole=seen is None))
        return sorted(found, key=lambda one: (one.reachable, -one.errors, -one.warnings, one.name))

    def runs(self) -> list[WatchedRun]:
        """The runs of all watched daemons, those that need attention first."""
        with self._lock:
            states = dict(self._states)
        found = [
            WatchedRun(
                daemon=_name(url), url=f"{url}/runs/{quote(one.run, safe='')}", reachable=state.problem is None, summary=one
            )
            for url, state in states.items()
            for one in state.said.summaries
        ]
        return sorted(found, key=_urgency)

    def alerts(self, after_s: float = UNREACHABLE_S) -> list[tuple[str, Attention]]:
        """An alert for each daemon that has been unreachable for so long."""
        with self._lock:
            states = dict(self._states)
        now = time.monotonic()
        return [
            (
                "",
                Attention(
                    level="error",
                    code="daemon-unreachable",
                    text=f"the daemon {_name(url)} does not answer since {state.since}: {state.problem}",
                    hint="Training continues, and its saves wait in shared memory. Start the daemon: it writes the sealed "
                    "saves.",
                ),
            )
            for url, state in states.items()
            if state.since_s is not None and now - state.since_s >= after_s
        ]

    def _run(self, url: str) -> None:
        while not self._closing.is_set():
            try:
                self._reached(url, self._ask(url))
            except _NotReached as error:
                self._not_reached(url, str(error))
            except Exception:
                log.exception("cannot watch %s", _name(url))
                self._not_reached(url, "its answer cannot be read")
            self._closing.wait(self._ask_s * random.uniform(0.8, 1.2))

    def _reached(self, url: str, said: _Said) -> None:
        with self._lock:
            before, self._states[url] = self._states[url], _State(said, None)
        if before.since is not None:
            log.info("the daemon at %s answers again; it did not since %s", url, before.since)

    def _not_reached(self, url: str, why: str) -> None:
        with self._lock:
            before = self._states[url]
            since, since_s = (before.since or utc_now(), before.since_s or time.monotonic())
            self._states[url] = _State(before.said, why, since, since_s)
        if before.since is None:
            log.warning("the daemon at %s cannot be reached: %s", url, why)

    def _ask(self, url: str) -> _Said:
        token = self._tokens.get(url)
        headers = {"Accept": "application/json"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
        limit = time.monotonic() + ANSWER_S
        try:
            with httpx.Client(
                verify=self._trust, headers=headers, timeout=TIMEOUT_S, trust_env=False, follow_redirects=False
            ) as client:
                health = _get(client, f"{url}/healthz", bodies.Health, limit)
                nodes = _get(client, f"{url}/v1/nodes", bodies.Page[bodies.Node], limit)
                return _Said(
                    version=health.version,
                    summaries=tuple(self._summaries(client, url, limit)),
                    ranks=sum(node.ranks for node in nodes.items),
                    asked=utc_now(),
                )
        except httpx.TimeoutException:
            raise _NotReached("no answer in time") from None
        except (httpx.HTTPError, OSError) as error:
            raise _NotReached(cause(error)) from None

    def _summaries(self, client: httpx.Client, url: str, limit: float) -> list[RunSummary]:
        found: list[RunSummary] = []
        query: dict[str, Any] = {"limit": PAGE_RUNS, "sort": "attention"}
        while len(found) < RUNS_MAX:
            page = _get(client, f"{url}/v1/summaries", bodies.Page[RunSummary], limit, query)
            found += page.items
            if page.next is None:
                break
            query["cursor"] = page.next
        return found[:RUNS_MAX]


def check_address(url: str) -> str:
    """The address of a daemon, without a slash at its end; `InvalidRequest`."""
    parts = urlsplit(url)
    try:
        fine = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        fine = False
    if not fine or parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc or not url.isascii():
        raise InvalidRequest(
            "--watch: this is not http://HOST:PORT or https://HOST:PORT", hint="see `holdfast serve --help`"
        )
    return url.rstrip("/")


def read_tokens(path: Path) -> dict[str, str]:
    """The token for each address, from lines `URL TOKEN`; `InvalidRequest`, which shows no token."""
    hint = "a line for each daemon: its address, a space, its token"
    try:
        with open(path, "rb") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o007:
                raise InvalidRequest(f"--watch-tokens: everybody can read {path}", hint=f"chmod 600 {path}")
            text = file.read(TOKENS_BYTES_MAX).decode("ascii")
    except OSError as error:
        raise InvalidRequest(f"--watch-tokens: cannot read {path}: {error.strerror}", hint=hint) from error
    except UnicodeDecodeError:
        raise InvalidRequest(f"--watch-tokens: {path} is not ASCII text", hint=hint) from None
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or check_address(words[0]) in found:
            raise InvalidRequest(
                f"--watch-tokens: line {number} of {path} is wrong, or its address appears twice", hint=hint
            )
        found[check_address(words[0])] = words[1]
    return found


def _get(client: httpx.Client, url: str, model: type[Model], limit: float, query: Mapping[str, Any] | None = None) -> Model:
    """One answer of a bounded length, in bounded time; `_NotReached`."""
    body = bytearray()
    with client.stream("GET", url, params=query) as answer:
        if answer.status_code in (401, 403):
            raise _NotReached("it requires another token: see --watch-tokens")
        if answer.status_code != 200:
            raise _NotReached(f"it answered with status {answer.status_code}")
        for part in answer.iter_bytes():
            body += part
            if len(body) > ANSWER_BYTES_MAX or time.monotonic() > limit:
                raise _NotReached("its answer is too long, or too slow")
    try:
        return model.model_validate_json(bytes(body))
    except ValidationError:
        raise _NotReached("its answer is none of a Holdfast daemon of this version") from None


def _daemon(url: str, state: _State, summaries: Sequence[RunSummary], whole: bool) -> WatchedDaemon:
    attention = [item.level for one in summaries for item in one.attention]
    return WatchedDaemon(
        name=_name(url),
        url=url,
        reachable=state.problem is None,
        unreachable_since=state.since,
        asked=state.said.asked,
        problem=state.problem if whole else None,
        version=state.said.version,
        runs=len(summaries),
        errors=attention.count("error"),
        warnings=attention.count("warning"),
        ranks=state.said.ranks if whole else 0,
    )


def _urgency(one: WatchedRun) -> tuple[bool, int, int, bool, str, str]:
    levels = [item.level for item in one.summary.attention]
    errors, warnings = levels.count("error"), levels.count("warning")
    return (not levels, -errors, -warnings, one.summary.state != "running", one.summary.run, one.daemon)


def _name(url: str) -> str:
    return urlsplit(url).netloc
