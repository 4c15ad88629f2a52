"""What the daemon takes for itself while people look at pages and ranks without shared memory upload packed chunks.

python -m benchmarks.service_memory --seconds 30

The bar: under 200 MiB at any moment, the arena not counted, and what was taken is given back.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch
import zstandard

from benchmarks.growth import MIB, Peak, own_bytes
from holdfast import Checkpointer
from holdfast_formats.digest import digest
from holdfast_formats.staging import wire
from holdfast_service.api.routes.uploads import CHUNK_BYTES_MAX
from tests.daemons import running

BAR_MIB = 200
UPLOADERS, READERS, TENSORS, STEPS = 16, 2, 5000, 6
CHUNK = CHUNK_BYTES_MAX
PAGES = (
    "/",
    "/runs/seen",
    "/runs/seen/checkpoints/3",
    "/runs/seen/checkpoints/3/tensors",
    "/runs/seen/checkpoints/3/health",
    "/runs/seen/checkpoints/3/files",
    "/runs/seen/compare?base=1&step=3",
    "/runs/seen/policy",
    "/events",
    "/nodes",
    "/jobs",
    "/metrics",
)


def fill(socket: Path) -> None:
    """A run whose checkpoints have many tensors."""
    state = {"model": {f"layer.{i}.weight": torch.full((64,), float(i)) for i in range(TENSORS)}}
    with Checkpointer("seen", state, at=socket) as checkpointer:
        for step in range(1, STEPS + 1):
            checkpointer.save(step, wait="durable")


class Load:
    """Threads that go on until they are told to end; `done` counts what each kind did."""

    def __init__(self) -> None:
        self.done: dict[str, int] = {}
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def begin(self, kind: str, act: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=self._repeat, args=(kind, act)))
        self._threads[-1].start()

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _repeat(self, kind: str, act: Callable[[], None]) -> None:
        while not self._ended.is_set():
            act()
            self.done[kind] = self.done.get(kind, 0) + 1


def uploading(url: str, number: int) -> Callable[[], None]:
    """A rank that uploads packed chunks, again and again."""
    http = httpx.Client(base_url=url, trust_env=False, timeout=60)
    plain = os.urandom(CHUNK // 2) + bytes(CHUNK // 2)
    packed = zstandard.ZstdCompressor().compress(plain)
    headers = {
        "Content-Range": f"bytes 0-{CHUNK - 1}/{CHUNK}",
        "X-Content-Digest": f"xxh3-64={digest(plain)}",
        "Content-Encoding": "zstd",
    }
    rank = f"/v1/ranks/{uuid.uuid4().hex}"
    about = {"protocol": wire.PROTOCOL, "run": f"remote-{number}", "rank": 0, "world": 1, "launch": "x"}
    http.put(rank, json=about).raise_for_status()
    http.put(f"{rank}/segment", json={"slots": 1, "data_bytes": CHUNK, "table_bytes": 4096}).raise_for_status()
    http.put(f"{rank}/uploads/0", json={"step": 1}).raise_for_status()

    def act() -> None:
        http.put(f"{rank}/uploads/0/data", content=packed, headers=headers).raise_for_status()

    return act


def looking(url: str, pages: itertools.cycle[str]) -> Callable[[], None]:
    http = httpx.Client(base_url=url, trust_env=False, timeout=60, follow_redirects=True)
    return lambda: (http.get(next(pages)), None)[1]


def measure(root: Path, seconds: float) -> dict[str, Any]:
    with running(root, listen="127.0.0.1:0") as daemon:
        pid = daemon.process.pid
        fill(daemon.socket)
        found: dict[str, Any] = {"before_mib": own_bytes(pid)[0] / MIB}
        for kinds in (("looks",), ("uploads",), ("looks", "uploads")):
            load, peak = Load(), Peak(pid)
            for number in range(READERS if "looks" in kinds else 0):
                load.begin("looks", looking(daemon.url, itertools.cycle(PAGES[number:] + PAGES[:number])))
            for number in range(UPLOADERS if "uploads" in kinds else 0):
                load.begin("uploads", uploading(daemon.url, number))
            time.sleep(seconds)
            load.end()
            name = "_and_".join(kinds)
            found[f"{name}_peak_mib"] = peak.end()
            found[name] = dict(load.done)
        time.sleep(2)
        found["after_mib"] = own_bytes(pid)[0] / MIB
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service_memory", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each of the three loads")
    parser.add_argument("--at", type=Path, help="a directory on the disk to use (default: the system's for temporary files)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.at, prefix="service-memory-") as directory:
        found = measure(Path(directory) / "root", given.seconds)
    print(json.dumps(found, indent=1))
    worst = max(value for name, value in found.items() if name.endswith("_mib"))
    print(f"the most: {worst:.0f} MiB, the bar: {BAR_MIB} MiB")
    return 1 if worst >= BAR_MIB else 0


if __name__ == "__main__":
    sys.exit(main())
