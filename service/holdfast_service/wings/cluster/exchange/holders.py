"""A client of a node that holds slots of a checkpoint. Every response has a time limit."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from holdfast_formats.staging.slot_ranges import SlotRange
from holdfast_service.daemon.arena.memory_checkpoints import MemoryStep
from holdfast_service.wings.cluster.exchange import memory_requests
from holdfast_service.wings.cluster.exchange import ranges as wanted
from holdfast_service.wings.cluster.exchange.fetching import read_ranges
from holdfast_service.wings.cluster.exchange.node_connection import NodeConnection, ProvenAnswer

CONNECT_S = 2.0


class HolderLost(Exception):
    """A node did not send its slots in time, or at all."""


class HoldingNode(NamedTuple):
    """A node, and the address of its exchange."""

    node: str
    url: str
    secrets: tuple[str, ...]

    def slots(self, of: MemoryStep, limit_s: float) -> list[memory_requests.SlotReport]:
        """The slots that it holds of a save. Raises `HolderLost`."""
        with self._answer(memory_requests.SLOTS_PATH, memory_requests.encode_slots_asked(of), limit_s) as answer:
            said = memory_requests.decode_slots(answer.read_whole(memory_requests.SLOTS_BYTES_MAX)).slots
            if not all(one.is_possible(of) for one in said):
                raise HolderLost(f"node {self.node} describes invalid slots")
            return list(said)

    def fetch(
        self,
        of: MemoryStep,
        slots: Sequence[memory_requests.SlotReport],
        ranges: Sequence[SlotRange],
        into: Mapping[int, memoryview],
        limit_s: float,
    ) -> None:
        """Copy these ranges of its slots to the same places of `into`, by rank. Raises `HolderLost`."""
        asked = memory_requests.encode_ranges_asked(of, {one.rank: one.table_digest for one in slots}, ranges)
        with self._answer(memory_requests.BYTES_PATH, asked, limit_s) as answer:
            if answer.length != wanted.answer_bytes(ranges):
                raise HolderLost(f"node {self.node} replied with {answer.length} bytes")
            read_ranges(answer, ranges, into)

    @contextmanager
    def _answer(self, path: str, body: bytes, limit_s: float) -> Iterator[ProvenAnswer]:
        connection = NodeConnection(self.url, self.secrets, min(CONNECT_S, limit_s), limit_s)
        try:
            connection.connect()
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise HolderLost(f"node {self.node} cannot be reached: {error}") from error
        over = threading.Timer(limit_s, connection.hang_up)
        over.start()
        try:
            answer = connection.request(path, body)
            if answer.status != http.HTTPStatus.OK:
                raise HolderLost(f"node {self.node} replied {answer.status}")
            yield answer
        except (OSError, http.client.HTTPException, msgspec.DecodeError, ValueError) as error:
            raise HolderLost(f"node {self.node} did not send its contents: {error or type(error).__name__}") from error
        finally:
            over.cancel()
            connection.close()
