"""Fetches bytes of slots from other nodes."""

from __future__ import annotations

import http.client
import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from holdfast_formats.digest import digest
from holdfast_formats.errors import RoundAborted
from holdfast_formats.staging.slot_ranges import SlotRange
from holdfast_service.wings.cluster.exchange import ranges as wanted
from holdfast_service.wings.cluster.exchange.node_connection import NodeConnection, ProvenAnswer

log = logging.getLogger(__name__)

TIMEOUT_S = 30.0
RETRY_S = 0.2


class _Busy(Exception):
    """The peer does not offer the round yet."""


class Peer:
    """The connection to one node, for one thread at a time."""

    def __init__(self, node: str, url: str, secrets: Sequence[str]) -> None:
        self._node, self._secrets, self._url = node, secrets, url
        self._connection = NodeConnection(url, secrets, TIMEOUT_S, TIMEOUT_S)
        self._lock = threading.Lock()

    def move_to(self, url: str) -> None:
        """The node's address from its next answer on; also while `fetch` asks it."""
        self._url = url

    def fetch(
        self, round_id: int, ranges: Sequence[SlotRange], into: Mapping[int, memoryview], go_on: Callable[[float], bool]
    ) -> None:
        """Copy these ranges of the peer's slots to the same places of `into`, by rank.

        Retries while `go_on(seconds)`, which waits that long, returns True; then `RoundAborted`.
        """
        with self._lock:
            while True:
                try:
                    return self._once(round_id, ranges, into)
                except (OSError, ValueError, http.client.HTTPException, _Busy) as error:
                    self._connection.close()
                    why = str(error) or type(error).__name__
                    if not go_on(RETRY_S):
                        raise RoundAborted(
                            f"node {self._node} did not send its part of the save: {why}",
                            hint="check that node's daemon and the network between the nodes; the next save tries again",
                            node=self._node,
                        ) from error
                    log.info("querying node %s again: %s", self._node, why)

    def close(self) -> None:
        self._connection.close()

    def _once(self, round_id: int, ranges: Sequence[SlotRange], into: Mapping[int, memoryview]) -> None:
        url = self._url
        if not url:
            raise _Busy("its address is unknown")
        if url != self._connection.url:
            self._connection.close()
            self._connection = NodeConnection(url, self._secrets, TIMEOUT_S, TIMEOUT_S)
        answer = self._connection.request(wanted.PATH.format(round_id), wanted.encode_asked(ranges))
        if answer.status == http.HTTPStatus.CONFLICT:
            raise _Busy("it does not offer the round")
        if answer.status != http.HTTPStatus.OK or answer.length != wanted.answer_bytes(ranges):
            raise http.client.HTTPException(f"it replied {answer.status} with {answer.length} bytes")
        read_ranges(answer, ranges, into)


def read_ranges(answer: ProvenAnswer, ranges: Sequence[SlotRange], into: Mapping[int, memoryview]) -> None:
    """Read ranges of slots to the same places of `into`. `HTTPException` for a changed chunk."""
    for one in ranges:
        for begin, end in wanted.chunks(one.begin, one.end):
            _read(answer.response, into[one.rank][begin:end])
            answer.check(digest(into[one.rank][begin:end]))


def _read(answer: http.client.HTTPResponse, target: memoryview) -> None:
    done = 0
    while done < len(target):
        count = answer.readinto(target[done:])
        if not count:
            raise http.client.IncompleteRead(b"", len(target) - done)
        done += count
