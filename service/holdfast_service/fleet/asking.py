"""Asks one daemon what it says of its runs. Whatever answers may not be a daemon, or may mean harm: an answer has a length
and a time, and what no daemon says is refused as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

import httpx
import msgspec
from msgspec import Meta
from pydantic import ValidationError

from holdfast_formats import moments
from holdfast_formats.decoding import decoder
from holdfast_formats.moments import utc_now
from holdfast_formats.naming import is_run_name
from holdfast_formats.rest.observed import Attention, RunSummary

TIMEOUT_S = 5.0  # for each step of an answer
ANSWER_BYTES_MAX = 4 * 1024 * 1024  # reading a longer one would hold up the other threads of this daemon
RUNS_MAX = 5000  # of one daemon
PAGE_RUNS = 200
SUMMARY_BYTES_MAX = 256 * 1024
NODES_MAX, RANKS_MAX = 10_000, 1_000_000
CURSOR_MAX = 4096  # characters
ATTENTION_MAX, ATTENTION_GIVEN_MAX = 50, 1000  # of a run, errors first
TEXT_MAX = 2000  # characters
SHORT_MAX = 64  # characters of a version, a time, a code
NUMBER_MAX = 2**63

Kind = TypeVar("Kind")
_NONE = "its answer is none of a Holdfast daemon of this version"


class NotReached(Exception):
    """Why a daemon could not be asked, in words without secrets."""


class Said(NamedTuple):
    """What a daemon said last."""

    version: str | None = None
    summaries: tuple[RunSummary, ...] = ()
    ranks: int = 0
    asked: str | None = None


class _Health(msgspec.Struct):
    version: Annotated[str, Meta(max_length=SHORT_MAX)] | None = None


class _Node(msgspec.Struct):
    ranks: Annotated[int, Meta(ge=0, le=RANKS_MAX)]


class _Nodes(msgspec.Struct):
    items: Annotated[list[_Node], Meta(max_length=NODES_MAX)]


class _Page(msgspec.Struct):
    """Summaries that are not read yet: what reads them lists every mistake, which for 4 MiB of nonsense are gigabytes."""

    items: Annotated[list[msgspec.Raw], Meta(max_length=PAGE_RUNS)]
    next: Annotated[str, Meta(max_length=CURSOR_MAX)] | None = None


class _Outline(msgspec.Struct):
    """What of a summary there may be many of."""

    attention: Annotated[list[msgspec.Raw], Meta(max_length=ATTENTION_GIVEN_MAX)]


_health, _nodes, _page, _outline = decoder(_Health), decoder(_Nodes), decoder(_Page), decoder(_Outline)


async def ask(client: httpx.AsyncClient, url: str) -> Said:
    """What a daemon says; `NotReached`, and what httpx raises."""
    health = await _get(client, f"{url}/healthz", _health)
    nodes = await _get(client, f"{url}/v1/nodes", _nodes)
    summaries = await _summaries(client, url)
    return Said(health.version, summaries, sum(node.ranks for node in nodes.items), utc_now())


async def _summaries(client: httpx.AsyncClient, url: str) -> tuple[RunSummary, ...]:
    found: list[RunSummary] = []
    query: dict[str, Any] = {"limit": PAGE_RUNS, "sort": "attention"}
    while len(found) < RUNS_MAX:
        page = await _get(client, f"{url}/v1/summaries", _page, query)
        found += (_read(one) for one in page.items)
        if page.next is None or not page.items:
            break
        query["cursor"] = page.next
    return tuple(found[:RUNS_MAX])


async def _get(
    client: httpx.AsyncClient, url: str, decode: Callable[[bytes | memoryview], Kind], query: Mapping[str, Any] | None = None
) -> Kind:
    """One answer of a bounded length."""
    body = bytearray()
    async with client.stream("GET", url, params=query) as answer:
        if answer.status_code in (401, 403):
            raise NotReached("it requires another token: see --watch-tokens")
        if answer.status_code != 200:
            raise NotReached(f"it answered with status {answer.status_code}")
        if answer.headers.get("content-encoding", "identity") != "identity":  # a few bytes could become gigabytes
            raise NotReached("its answer is compressed, which was not asked for")
        async for part in answer.aiter_raw():
            body += part
            if len(body) > ANSWER_BYTES_MAX:
                raise NotReached("its answer is too long")
    try:
        return decode(bytes(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise NotReached(_NONE) from None


def _read(given: msgspec.Raw) -> RunSummary:
    """A summary; `NotReached`."""
    text = bytes(given)
    if len(text) > SUMMARY_BYTES_MAX:
        raise NotReached(_NONE)
    try:
        _outline(text)
        return _checked(RunSummary.model_validate_json(text))
    except (msgspec.DecodeError, ValidationError):
        raise NotReached(_NONE) from None


def _checked(summary: RunSummary) -> RunSummary:
    """A summary as a daemon may write one; `NotReached`."""
    times = [text for text in (summary.last_commit, summary.state_since) if text is not None]
    numbers = [value for _, value in summary if isinstance(value, (int, float))]
    attention = sorted(summary.attention, key=lambda item: item.level != "error")[:ATTENTION_MAX]
    fine = (
        is_run_name(summary.run)
        and all(map(_is_time, times))
        and all(map(_is_number, (*numbers, *_steps(attention))))
        and all(len(item.code) <= SHORT_MAX for item in attention)
    )
    if not fine:
        raise NotReached(_NONE)
    return summary.model_copy(update={"attention": [_cut(item) for item in attention], "metrics": {}})


def _steps(attention: Iterable[Attention]) -> Iterator[int]:
    return (item.step for item in attention if item.step is not None)


def _cut(item: Attention) -> Attention:
    if len(item.text) <= TEXT_MAX and len(item.hint) <= TEXT_MAX:
        return item
    return item.model_copy(update={"text": item.text[:TEXT_MAX], "hint": item.hint[:TEXT_MAX]})


def _is_time(text: str) -> bool:
    try:
        moments.read(text[: SHORT_MAX + 1])
    except ValueError:
        return False
    return len(text) <= SHORT_MAX


def _is_number(value: float) -> bool:
    return -NUMBER_MAX < value < NUMBER_MAX  # which nan is not
