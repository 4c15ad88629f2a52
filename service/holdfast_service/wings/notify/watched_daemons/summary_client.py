"""Queries one daemon's runs. The peer may be no daemon, or malicious: a response is limited in length and time, and an
invalid one is refused as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

import httpx
import msgspec
from msgspec import Meta
from pydantic import ValidationError

from holdfast_formats.decoding import decoder
from holdfast_formats.naming import is_run_name
from holdfast_formats.rest.measurements import RunSummary
from holdfast_formats.timestamps import utc_now
from holdfast_service.wings.notify.watched_daemons.bounded_answers import LIST_MAX, MemoryAllowance, Unbounded

TIMEOUT_S = 5.0  # for each step of an answer
ANSWER_BYTES_MAX = 4 * 1024 * 1024  # reading a longer one would hold up the other threads of this daemon
RUNS_MAX = 5000  # of one daemon
PAGE_RUNS = 200
SUMMARY_BYTES_MAX = 256 * 1024
NODES_MAX, RANKS_MAX = 10_000, 1_000_000
CURSOR_MAX = 4096  # characters
REPORT_BYTES_MAX = 128 * 1024 * 1024  # about so much memory for one daemon's runs; beyond it, the most urgent are kept
ATTENTION_MAX = 20  # of a run, errors first
SHORT_MAX = 64  # characters of a version, a code

Kind = TypeVar("Kind")
_NONE = "its reply does not come from a Holdfast daemon of this version"


class DaemonUnreachable(Exception):
    """Why a daemon could not be queried, without secrets."""


class Said(NamedTuple):
    """A daemon's last response."""

    version: str | None = None
    summaries: tuple[RunSummary, ...] = ()
    ranks: int = 0
    asked: str | None = None
    cut: bool = False  # not all of its runs are kept


class _Listed(NamedTuple):
    summaries: tuple[RunSummary, ...]
    cut: bool


class _Health(msgspec.Struct):
    version: Annotated[str, Meta(max_length=SHORT_MAX)] | None = None


class _Node(msgspec.Struct):
    ranks: Annotated[int, Meta(ge=0, le=RANKS_MAX)]


class _Nodes(msgspec.Struct):
    items: Annotated[list[_Node], Meta(max_length=NODES_MAX)]


class _Page(msgspec.Struct):
    """Summaries in raw form: validation lists every mistake, which for 4 MiB of nonsense are gigabytes."""

    items: Annotated[list[msgspec.Raw], Meta(max_length=PAGE_RUNS)]
    next: Annotated[str, Meta(max_length=CURSOR_MAX)] | None = None


class _Summary(msgspec.Struct):
    """The fields of a summary that are read before validation."""

    attention: Annotated[list[dict[str, Any]], Meta(max_length=LIST_MAX)]


_health, _nodes, _page, _outline = decoder(_Health), decoder(_Nodes), decoder(_Page), decoder(_Summary)
_whole = decoder(dict[str, Any])


async def ask(client: httpx.AsyncClient, url: str) -> Said:
    """A daemon's response; `DaemonUnreachable`, and what httpx raises."""
    health = await _get(client, f"{url}/healthz", _health)
    nodes = await _get(client, f"{url}/v1/nodes", _nodes)
    listed = await _summaries(client, url)
    return Said(health.version, listed.summaries, sum(node.ranks for node in nodes.items), utc_now(), listed.cut)


async def _summaries(client: httpx.AsyncClient, url: str) -> _Listed:
    """The runs that need attention most, as many as are listed and fit memory."""
    run_summaries: list[RunSummary] = []
    allowance = MemoryAllowance(REPORT_BYTES_MAX)
    query: dict[str, Any] = {"limit": PAGE_RUNS, "sort": "attention"}
    while len(run_summaries) < RUNS_MAX and allowance.left > 0:
        page = await _get(client, f"{url}/v1/summaries", _page, query)
        for one in page.items:
            read = _read(one, allowance)
            if allowance.left < 0:
                return _Listed(tuple(run_summaries), True)
            run_summaries.append(read)
        if page.next is None or not page.items:
            break
        query["cursor"] = page.next
    return _Listed(tuple(run_summaries[:RUNS_MAX]), False)


async def _get(
    client: httpx.AsyncClient, url: str, decode: Callable[[bytes | memoryview], Kind], query: Mapping[str, Any] | None = None
) -> Kind:
    """One response of a limited length."""
    body = bytearray()
    async with client.stream("GET", url, params=query) as answer:
        if answer.status_code in (401, 403):
            raise DaemonUnreachable("it requires another token: see --watch-tokens")
        if answer.status_code != 200:
            raise DaemonUnreachable(f"it replied with status {answer.status_code}")
        if answer.headers.get("content-encoding", "identity") != "identity":  # a few bytes could become gigabytes
            raise DaemonUnreachable("its reply is compressed, although compression was not requested")
        async for part in answer.aiter_raw():
            body += part
            if len(body) > ANSWER_BYTES_MAX:
                raise DaemonUnreachable("its reply is too long")
    try:
        return decode(bytes(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise DaemonUnreachable(_NONE) from None


def _read(given: msgspec.Raw, allowance: MemoryAllowance) -> RunSummary:
    """A valid summary; `DaemonUnreachable`."""
    text = bytes(given)
    if len(text) > SUMMARY_BYTES_MAX:
        raise DaemonUnreachable(_NONE)
    try:
        attention = sorted(_outline(text).attention, key=lambda item: item.get("level") != "error")
        kept = {**_whole(text), "attention": attention[:ATTENTION_MAX], "metrics": {}}
        summary = RunSummary.model_validate(allowance.bounded(kept))
    except (msgspec.DecodeError, ValidationError, Unbounded, RecursionError):
        raise DaemonUnreachable(_NONE) from None
    if not is_run_name(summary.run) or any(len(item.code) > SHORT_MAX for item in summary.attention):
        raise DaemonUnreachable(_NONE)
    return summary
