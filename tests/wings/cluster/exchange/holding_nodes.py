"""Nodes that hold slots, for tests: with real memory, a real exchange, and a relay before it that cuts and stalls."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress

from holdfast_formats.digest import digest
from holdfast_formats.region import Box
from holdfast_formats.staging import arena, slot_table
from holdfast_formats.staging.arena import SegmentOwner, SlotHeader, SlotState
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_formats.tensors import StagedFragment, TensorSpec
from holdfast_service.daemon.arena.memory_checkpoints import MemoryCheckpoints, MemoryStep
from holdfast_service.daemon.arena.segment import ArenaSegment, memfd
from holdfast_service.wings.cluster.exchange.holders import HoldingNode
from holdfast_service.wings.cluster.exchange.server import ExchangeServer

SECRET = "s" * 43
SIZE = 1_500_003
STEP = MemoryStep("run", 7, 2, 0, 4)


class Relay:
    """Forwards connections to a port. What comes back is counted, and held up after `stall_after` bytes, or cut."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.sent = 0
        self.stall_after = self.cut_after = 2**62
        self._over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._over.set()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        with suppress(OSError), near, socket.create_connection(("127.0.0.1", self.port)) as far:
            there = threading.Thread(target=self._forward, args=(near, far, False), daemon=True)
            there.start()
            self._forward(far, near, True)
            there.join()

    def _forward(self, source: socket.socket, sink: socket.socket, back: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                if back and self.sent + len(data) > self.cut_after:
                    break
                if back and self.sent + len(data) > self.stall_after:
                    self._over.wait(180)
                sink.sendall(data)
                self.sent += len(data) if back else 0
        for side in (source, sink):
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)


class _BehindRelay(ExchangeServer):
    """An exchange that other nodes reach by its relay, and that knows so."""

    relay: Relay | None = None

    @property
    def url(self) -> str:
        return super().url if self.relay is None else self.relay.url


class Holding:
    """A node that holds one rank's slot of `STEP`."""

    def __init__(self, name: str, rank: int, of: MemoryStep = STEP, slots: int = 1) -> None:
        self.name, self.rank, self.of = name, rank, of
        self.data = os.urandom(SIZE)
        self.holds = MemoryCheckpoints(lambda run, step: (of.attempt, of.turn), partly=True)
        self.exchange = _BehindRelay("127.0.0.1", 0, self.holds.lent, lambda: (SECRET,))
        geometry = arena.geometry(slots, SIZE, 4096)
        owner = SegmentOwner(of.run, rank, of.world, of.attempt)
        self.segment = ArenaSegment.make(memfd("test", geometry.segment_bytes), geometry, owner)
        self.relay = self.exchange.relay = Relay(int(self.exchange.url.rsplit(":", 1)[1]))
        self.save()

    def save(self) -> None:
        """Seal a slot; it is committed, and held."""
        of, segment = self.of, self.segment
        slot = segment.lease(of.step, of.attempt, 0)
        start, at = segment.geometry.data_offset(slot), segment.geometry.table_offset(slot)
        segment.memory[start : start + SIZE] = self.data
        spec = TensorSpec("model", "w", "U8", (of.world, SIZE))
        held = (StagedFragment(spec, (Box((self.rank, 0), (1, SIZE)),), 0),)
        table = SlotTable(of.run, of.step, of.attempt, self.rank, of.world, ("model",), held, {}, {}, turn=of.turn)
        encoded = slot_table.encode(table)
        segment.memory[at : at + len(encoded)] = encoded
        header = SlotHeader(SlotState.LEASED, of.step, of.attempt, SIZE, len(encoded), 0)
        arena.seal(segment.memory, segment.geometry, slot, header, digest(encoded))
        sealed = segment.take_sealed(slot, of.step, digest(encoded))
        self.holds.keep(of.run, of.step, of.attempt, {self.rank: sealed})
        sealed.release()

    @property
    def node(self) -> HoldingNode:
        return HoldingNode(self.name, self.relay.url, (SECRET,))

    def close(self) -> None:
        self.relay.close()
        self.exchange.close()
        self.segment.close()
