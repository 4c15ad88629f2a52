"""How fast the bytes of a peer's slots come, against the least that http.server and http.client can do on the loopback:

    python -m benchmarks.exchange [--mib 512] [--rounds 9]

The peer is a process of its own. In every round the same bytes come by a plain `readinto`, as those of a round that is being
saved, and as those of an in-memory checkpoint that ranks restore from: into memory that ranks map, digested on both sides.
Printed are GiB/s, and the ratios of a round's rates to that of its `readinto`: medians and ranges.
"""

from __future__ import annotations

import argparse
import http.server
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from benchmarks.joint import SECRETS, plain_handler, read_plainly, summary
from holdfast_formats.digest import digest
from holdfast_formats.staging import arena, slot_table
from holdfast_formats.staging.arena import SegmentOwner, SlotHeader, SlotState
from holdfast_formats.staging.slot_ranges import SlotRange
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_service.daemon.arena.memory_checkpoints import MemoryCheckpoints, MemoryStep
from holdfast_service.daemon.arena.segment import ArenaSegment, memfd
from holdfast_service.wings.cluster.exchange.fetching import Peer
from holdfast_service.wings.cluster.exchange.holders import HoldingNode
from holdfast_service.wings.cluster.exchange.peer_memory import PeerMemory
from holdfast_service.wings.cluster.exchange.server import ExchangeServer

STEP = MemoryStep("run", 1, 1, 0, 2)
BATCH_BYTES = 2**25  # as ranks ask for


def serve(size: int, told: Connection) -> None:
    """Be the peer, until `told` says something."""
    geometry = arena.geometry(1, size, 4096)
    owner = SegmentOwner(STEP.run, 0, STEP.world, STEP.attempt)
    segment = ArenaSegment.make(memfd("benchmark", geometry.segment_bytes), geometry, owner)
    slot = segment.lease(STEP.step, STEP.attempt, 0)
    start, at = geometry.data_offset(slot), geometry.table_offset(slot)
    for begin in range(0, size, 2**20):
        segment.memory[start + begin : start + begin + 2**20] = os.urandom(2**20)
    encoded = slot_table.encode(SlotTable(STEP.run, STEP.step, STEP.attempt, 0, STEP.world, (), (), {}, {}))
    segment.memory[at : at + len(encoded)] = encoded
    header = SlotHeader(SlotState.LEASED, STEP.step, STEP.attempt, size, len(encoded), 0)
    arena.seal(segment.memory, geometry, slot, header, digest(encoded))
    sealed = segment.take_sealed(slot, STEP.step, digest(encoded))
    holds = MemoryCheckpoints(lambda run, step: STEP.launch, partly=True)
    holds.keep(STEP.run, STEP.step, STEP.attempt, {0: sealed})
    exchange = ExchangeServer("127.0.0.1", 0, holds.lent, lambda: SECRETS)
    exchange.offer(1, {0: sealed.data})
    plain = http.server.ThreadingHTTPServer(("127.0.0.1", 0), plain_handler(sealed.data))
    threading.Thread(target=plain.serve_forever, daemon=True).start()
    told.send((exchange.url, f"http://127.0.0.1:{plain.server_address[1]}"))
    told.recv()


def ways(size: int, url: str, plain: str) -> dict[str, Callable[[], float]]:
    """By name, what brings all bytes once and returns the seconds that it took."""
    into = memoryview(bytearray(size))
    peer = Peer("a", url, SECRETS)

    def readinto() -> float:
        began = time.monotonic()
        read_plainly(plain, into)
        return time.monotonic() - began

    def of_round() -> float:
        began = time.monotonic()
        peer.fetch(1, [SlotRange(0, 0, size)], {0: into}, lambda seconds: False)
        return time.monotonic() - began

    def in_memory() -> float:
        memory = PeerMemory(lambda of: [HoldingNode("a", url, SECRETS)], lambda: 2**60)
        (mirror,) = memory.open(STEP, "rank")
        mirror.slot[:size] = bytes(size)  # pages are there, as they are in the other ways
        began = time.monotonic()
        for begin in range(0, size, BATCH_BYTES):
            assert not memory.fetch(STEP, [SlotRange(0, begin, min(begin + BATCH_BYTES, size))])
        took_s = time.monotonic() - began
        memory.release("rank")
        return took_s

    return {"readinto": readinto, "round": of_round, "in-memory": in_memory}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    size = given.mib * 2**20
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(size, there))
    process.start()
    tried = ways(size, *here.recv())
    rates: dict[str, list[float]] = {name: [] for name in tried}
    for number in range(given.rounds + 1):
        order = list(tried.items())
        for name, act in order if number % 2 else reversed(order):
            rates[name].append(given.mib / 1024 / act())
    here.send("over")
    process.join()
    for name, found in rates.items():
        ratios = [ours / theirs for ours, theirs in zip(found[1:], rates["readinto"][1:], strict=True)]
        print(f"{name}: {summary(found[1:])} GiB/s, {summary(ratios)} of readinto", flush=True)


if __name__ == "__main__":
    main()
