"""Watches other daemons over their REST API: their runs, and since when one is unreachable.

Nothing is stored: a restarted daemon knows only its own queries. The addresses come from the command line, and a token is
sent to its own address alone; no redirect is followed.
"""

from __future__ import annotations

import heapq
import logging
import os
import random
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice, repeat
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlsplit

import httpx

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest.measurements import Attention, RunSummary
from holdfast_formats.rest.notifications import WatchedDaemon, WatchedRun
from holdfast_formats.timestamps import utc_now
from holdfast_service.wings.notify.watched_daemons.summary_client import RUNS_MAX, TIMEOUT_S, DaemonUnreachable, Said, ask
from holdfast_service.wings.notify.watched_daemons.tls_connections import cause, trusting, within

log = logging.getLogger(__name__)

ASK_S = 5.0  # interval of queries
ANSWER_S = 30.0  # for all its answers
DAEMONS_MAX = 256
ALL_RUNS_MAX = DAEMONS_MAX * RUNS_MAX
UNREACHABLE_S = 30.0  # an alert follows after so long
CLOSE_S = 3.0
TOKENS_BYTES_MAX = 256 * 1024


class _Run(NamedTuple):
    """A daemon's run, and its position in the list of all runs."""

    urgency: tuple[bool, int, int, bool, str, str]
    summary: RunSummary


class _State(NamedTuple):
    answer: Said = Said()
    problem: str | None = "it has not been queried yet"
    since: str | None = None  # unreachable
    since_s: float | None = None  # the same by the monotonic clock
    runs: tuple[_Run, ...] = ()  # the most urgent one first


class DaemonWatch:
    """Watched daemons, each queried in its own thread. Thread-safe."""

    def __init__(self, urls: Sequence[str], tokens: Mapping[str, str], ca: Path | None = None, ask_s: float = ASK_S) -> None:
        """Raises `InvalidRequest` for an invalid address, or a token for an unwatched address."""
        if len(urls) > DAEMONS_MAX:
            raise InvalidRequest(f"--watch: at most {DAEMONS_MAX} daemons", hint="watch fewer daemons")
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

    def daemons(self, sees: Callable[[str], bool] | None = None) -> list[WatchedDaemon]:
        """All watched daemons, those that need attention first. `sees` filters runs; daemons without a visible run are
        omitted then.
        """
        with self._lock:
            states = dict(self._states)
        found = []
        for url, state in states.items():
            runs = [one for one in state.runs if sees is None or sees(one.summary.run)]
            if sees is None or runs:
                found.append(_daemon(url, state, runs, whole=sees is None))
        return sorted(found, key=lambda one: (one.reachable, -one.errors, -one.warnings, one.name))

    def runs(
        self,
        sees: Callable[[str], bool] = lambda run: True,
        first: int = 0,
        count: int | None = None,
    ) -> list[WatchedRun]:
        """`count` runs of all watched daemons that pass `sees`, from the `first` on; those that need attention come first.
        Only these are built: there may be a million.
        """
        with self._lock:
            states = dict(self._states)
        first = min(first, ALL_RUNS_MAX)
        listed = (zip(state.runs, repeat(url), repeat(state.problem is None)) for url, state in states.items())
        merged = heapq.merge(*listed, key=lambda one: one[0].urgency)
        wanted = (one for one in merged if sees(one[0].summary.run))
        return [
            WatchedRun(
                daemon=_name(url),
                url=f"{url}/runs/{quote(run.summary.run, safe='')}",
                reachable=reachable,
                summary=run.summary,
            )
            for run, url, reachable in islice(wanted, first, None if count is None else first + count)
        ]

    def alerts(self, after_s: float = UNREACHABLE_S) -> list[tuple[str, Attention]]:
        with self._lock:
            states = dict(self._states)
        now = time.monotonic()
        return [
            (
                "",
                Attention(
                    level="error",
                    code="daemon-unreachable",
                    text=f"the daemon {_name(url)} has not answered since {state.since}: {state.problem}",
                    hint="Training continues; its saves wait in shared memory. Start the daemon, which then writes them.",
                ),
            )
            for url, state in states.items()
            if state.since_s is not None and now - state.since_s >= after_s
        ]

    def _run(self, url: str) -> None:
        while not self._closing.is_set():
            try:
                self._reached(url, self._ask(url))
            except DaemonUnreachable as error:
                self._not_reached(url, str(error))
            except Exception:
                log.exception("cannot watch %s", _name(url))
                self._not_reached(url, "its reply cannot be read")
            self._closing.wait(self._ask_s * random.uniform(0.8, 1.2))

    def _reached(self, url: str, answer: Said) -> None:
        runs = sorted((_Run(_urgency(one, _name(url)), one) for one in answer.summaries), key=lambda one: one.urgency)
        with self._lock:
            before, self._states[url] = self._states[url], _State(answer, None, runs=tuple(runs))
        if answer.cut and not before.answer.cut:
            log.warning("the daemon at %s has too many runs to show; only the first %d are shown", url, len(runs))
        if before.since is not None:
            log.info("the daemon at %s can be reached again; it could not be since %s", url, before.since)

    def _not_reached(self, url: str, why: str) -> None:
        with self._lock:
            before = self._states[url]
            since, since_s = (before.since or utc_now(), before.since_s or time.monotonic())
            self._states[url] = before._replace(problem=why, since=since, since_s=since_s)
        if before.since is None:
            log.warning("the daemon at %s cannot be reached: %s", url, why)

    def _ask(self, url: str) -> Said:
        token = self._tokens.get(url)
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"

        async def asked() -> Said:
            async with httpx.AsyncClient(
                verify=self._trust, headers=headers, timeout=TIMEOUT_S, trust_env=False, follow_redirects=False
            ) as client:
                return await ask(client, url)

        try:
            return within(ANSWER_S, asked())
        except (httpx.TimeoutException, TimeoutError):
            raise DaemonUnreachable("no reply in time") from None
        except (httpx.HTTPError, OSError) as error:
            raise DaemonUnreachable(cause(error)) from None


def check_address(url: str) -> str:
    """The address of a daemon, without a slash at its end; `InvalidRequest`."""
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        fine = False
    plain = url.isascii() and url.isprintable() and not set(" ?#@\\") & set(url)
    if not fine or not plain or parts.path.strip("/"):
        raise InvalidRequest(
            "--watch: this is not http://HOST:PORT or https://HOST:PORT", hint="see `holdfast serve --help`"
        )
    return url.rstrip("/")


def read_tokens(path: Path) -> dict[str, str]:
    """The token for each address, from lines `URL TOKEN`; `InvalidRequest`, which shows no token."""
    hint = "write one line per daemon: its address, a space, its token"
    try:
        with open(path, "rb") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o007:
                raise InvalidRequest(f"--watch-tokens: every user can read {path}", hint=f"chmod 600 {path}")
            text = file.read(TOKENS_BYTES_MAX + 1).decode("ascii")
    except OSError as error:
        raise InvalidRequest(f"--watch-tokens: cannot read {path}: {error.strerror}", hint=hint) from error
    except UnicodeDecodeError:
        raise InvalidRequest(f"--watch-tokens: {path} is not ASCII text", hint=hint) from None
    if len(text) > TOKENS_BYTES_MAX:
        raise InvalidRequest(f"--watch-tokens: {path} has more than {TOKENS_BYTES_MAX} bytes", hint=hint)
    tokens: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or check_address(words[0]) in tokens:
            raise InvalidRequest(
                f"--watch-tokens: line {number} of {path} is wrong, or its address appears twice", hint=hint
            )
        tokens[check_address(words[0])] = words[1]
    return tokens


def _daemon(url: str, state: _State, runs: Sequence[_Run], whole: bool) -> WatchedDaemon:
    return WatchedDaemon(
        name=_name(url),
        url=url,
        reachable=state.problem is None,
        unreachable_since=state.since,
        asked=state.answer.asked,
        problem=state.problem if whole else None,
        version=state.answer.version,
        runs=len(runs),
        errors=-sum(one.urgency[1] for one in runs),
        warnings=-sum(one.urgency[2] for one in runs),
        ranks=state.answer.ranks if whole else 0,
    )


def _urgency(summary: RunSummary, daemon: str) -> tuple[bool, int, int, bool, str, str]:
    levels = [item.level for item in summary.attention if item.acknowledged is None]
    errors, warnings = levels.count("error"), levels.count("warning")
    return (not levels, -errors, -warnings, summary.state != "running", summary.run, daemon)


def _name(url: str) -> str:
    return urlsplit(url).netloc
