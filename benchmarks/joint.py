"""Ranks of several nodes save one checkpoint, against the same ranks at one daemon; and the bytes between two nodes:

    python -m benchmarks.joint [--mib 256] [--pairs 5] [--directory DIR]

Daemons are processes of this machine, on one disk, with one PostgreSQL; ranks are threads of this process. Every pair saves
the same state once through four daemons and once through one, in turn. Printed are seconds from save() until all ranks know
that it is committed, medians and ranges, and ratios of pairs. `small` is a save of a few bytes: what agreeing costs.
"""

from __future__ import annotations

import argparse
import http.client
import http.server
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import torch

from holdfast import Checkpointer, Fragment
from holdfast.launch import Launch, assigned
from holdfast_formats.staging.slot_ranges import SlotRange
from holdfast_service.wings.cluster.exchange.fetching import Peer
from holdfast_service.wings.cluster.exchange.server import ExchangeServer
from tests.databases import running_postgres
from tests.regressions.test_many_daemons import Daemon

ROW = 2**18  # elements of a row: 1 MiB
SECRETS = ("benchmark",)


class World:
    """A launch of as many ranks as places: each holds rows of one tensor, of `mib` MiB, or columns."""

    def __init__(self, run: str, places: Sequence[Daemon], mib: int, columns: bool = False) -> None:
        self.places, self.step = places, 0
        world = len(places)
        self.tensors, self.checkpointers = [], []
        for rank, daemon in enumerate(places):
            if columns:
                mine = torch.full((mib * world, ROW // world), float(rank))
                held = Fragment(mine, (mib * world, ROW), offset=(0, rank * (ROW // world)))
            else:
                mine = torch.full((mib, ROW), float(rank))
                held = Fragment(mine, (mib * world, ROW), offset=(rank * mib, 0))
            self.tensors.append(mine)
            with assigned(partial(Launch, rank, world, f"{run}-{id(self)}", world)):
                self.checkpointers.append(Checkpointer(run, {"model": {"w": held}}, at=daemon.socket, keep_last=1))

    def save(self) -> float:
        """Seconds until all ranks know that the step is committed."""
        self.step += 1
        for tensor in self.tensors:
            tensor.add_(1.0)
        began = time.monotonic()
        tickets: list[Any] = [None] * len(self.checkpointers)

        def save(rank: int) -> None:
            tickets[rank] = self.checkpointers[rank].save(self.step)

        threads = [threading.Thread(target=save, args=(rank,)) for rank in range(len(tickets))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for ticket in tickets:
            ticket.result(300)
        return time.monotonic() - began

    def settle(self) -> None:
        """What was committed is checked, and the one before it removed."""
        time.sleep(1.0)

    def close(self) -> None:
        for one in self.checkpointers:
            one.close()


def summary(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f}–{max(values):.3f})"


def pairs(name: str, many: World, one: World, count: int) -> None:
    """Saves in turn; the first of each is not counted."""
    for world in (many, one):
        world.save()
        world.settle()
    found: list[tuple[float, float]] = []
    for number in range(count):
        order = (many, one) if number % 2 else (one, many)
        seconds = {}
        for world in order:
            seconds[id(world)] = world.save()
            world.settle()
        found.append((seconds[id(many)], seconds[id(one)]))
    ratios = [one_s / many_s for many_s, one_s in found]
    several, single = ([pair[side] for pair in found] for side in (0, 1))
    print(f"{name}: four daemons {summary(several)} s, one {summary(single)} s, speed {summary(ratios)}", flush=True)


def latency(daemons: Sequence[Daemon], url: str, count: int) -> None:
    """Saves of a few bytes on all nodes, and what they ask of PostgreSQL."""
    world = World(f"small-{len(daemons)}", daemons, 1)
    world.tensors = [tensor[:, :1] for tensor in world.tensors]
    world.save()
    before = transactions(url)
    began = time.monotonic()
    found = [world.save() for _ in range(count)]
    lasted = time.monotonic() - began
    asked = (transactions(url) - before) / count / len(daemons)
    print(f"{len(daemons)} nodes, 1 MiB a rank: {summary(found)} s, {asked:.1f} transactions a node a save ({lasted:.1f} s)")
    world.close()


def transactions(url: str) -> int:
    time.sleep(1.5)  # the server counts a moment later
    with psycopg.connect(url.replace("postgresql+psycopg", "postgresql")) as connection:
        row = connection.execute("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()").fetchone()
        assert row is not None
        return int(row[0])


def exchange(mib: int, count: int) -> None:
    """The same bytes by the exchange, and by the least that http.server and http.client can do."""
    slot = memoryview(bytearray(os.urandom(2**20) * mib))
    into = memoryview(bytearray(len(slot)))
    serving = ExchangeServer("127.0.0.1", secrets=lambda: SECRETS)
    serving.offer(1, {0: slot})
    peer = Peer("a", serving.url, SECRETS)
    plain = http.server.ThreadingHTTPServer(("127.0.0.1", 0), plain_handler(slot))
    threading.Thread(target=plain.serve_forever, daemon=True).start()
    rates: dict[str, list[float]] = {"exchange": [], "readinto": []}
    for _ in range(count + 1):
        for name in rates:
            began = time.monotonic()
            if name == "exchange":
                peer.fetch(1, [SlotRange(0, 0, len(slot))], {0: into}, lambda seconds: False)
            else:
                read_plainly(f"http://127.0.0.1:{plain.server_address[1]}", into)
            rates[name].append(mib / 1024 / (time.monotonic() - began))
    ratios = [ours / theirs for ours, theirs in list(zip(*rates.values(), strict=True))[1:]]
    ours, theirs = (summary(found[1:]) for found in rates.values())
    print(f"between nodes, GiB/s: exchange {ours}, readinto {theirs}, ratio {summary(ratios)}")
    peer.close()
    serving.close()
    plain.shutdown()
    plain.server_close()


def plain_handler(slot: memoryview) -> type[http.server.BaseHTTPRequestHandler]:
    class Plain(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(slot)))
            self.end_headers()
            self.wfile.write(slot)

        def log_message(self, format: str, *values: object) -> None:
            return

    return Plain


def read_plainly(url: str, into: memoryview) -> None:
    at = urlsplit(url)
    connection = http.client.HTTPConnection(at.hostname or "", at.port, blocksize=2**20)
    connection.request("GET", "/")
    answer = connection.getresponse()
    done = 0
    while done < len(into):
        done += answer.readinto(into[done:])
    connection.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=256, help="of state a rank")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--directory", type=Path)
    given = parser.parse_args()
    exchange(given.mib, given.pairs)
    with running_postgres() as postgres, tempfile.TemporaryDirectory(dir=given.directory) as made:
        site, single = Path(made) / "many" / "root", Path(made) / "one" / "root"
        for root in (site, single):
            root.parent.mkdir()
        url, own = postgres.take(), postgres.take()
        daemons = [Daemon(site, f"n{number}", url) for number in range(8)]
        alone = Daemon(single, "alone", own)
        latency(daemons[:2], url, 2 * given.pairs)
        latency(daemons, url, 2 * given.pairs)
        for name, columns in (("rows", False), ("columns", True)):
            many = World(name, daemons[:4], given.mib, columns)
            one = World(name, [alone] * 4, given.mib, columns)
            pairs(f"{name}, 4 x {given.mib} MiB", many, one, given.pairs)
            many.close()
            one.close()
        for daemon in (*daemons, alone):
            daemon.stop()


if __name__ == "__main__":
    main()
