"""Shards over loopback HTTP beside the same bytes sent by plain file servers, in one run, alternating.

python -m benchmarks.shards --runs 7

The bar: at least 0.7 of what starlette's FileResponse sends under the same server, while the daemon's memory grows by less
than 256 MiB. Python's own `http.server` stands beside them. Every body is compared with the first one by its digest, outside
of the time taken.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from holdfast_formats import naming
from holdfast_formats.digest import running as running_digest
from holdfast_formats.disk.packing import extent_bytes
from tests.checkpoints import build
from tests.daemons import running

MIB = 2**20
SHARD_BYTES = 512 * MIB
BAR_RATIO, BAR_GROWTH_MIB = 0.7, 256.0
BUFFER_BYTES = MIB
HIDDEN, INNER, HEADS, VOCABULARY = 2048, 8192, 16, 32_000
CASES = {  # name -> the run that holds it, the layout, the rank
    "rows": ("whole", "sharding=2:stage3:dim0", 1),
    "columns": ("down", "tp=2", 1),
    "columns of 8": ("down8", "tp=8", 5),
    "flat": ("whole", "sharding=2:stage3:flat-param", 1),
    "tensor parallel": ("whole", "tp=2", 1),
    "everything": ("half", "", 0),
}
_SERVER = """
import socket, sys, uvicorn
from starlette.applications import Starlette
from starlette.responses import FileResponse
from starlette.routing import Route
def send(request):
    return FileResponse(sys.argv[1] + "/" + request.path_params["name"])
listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
listener.bind(("127.0.0.1", 0)); listener.listen()
print(listener.getsockname()[1], flush=True)
app = Starlette(routes=[Route("/{name}", send)])
uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off")).run(sockets=[listener])
"""
_HTTP_SERVER = """
import functools, http.server, sys
class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=sys.argv[1]))
print(server.server_address[1], flush=True); server.serve_forever()
"""


class Body(NamedTuple):
    """An answer: its bytes, the time from the request to the last of them, and their digest where it was asked for."""

    bytes: int
    seconds: float
    digest: str


def fetch(port: int, path: str, digest: bool = False, keep: Callable[[memoryview], object] | None = None) -> Body:
    """GET over a plain socket into one buffer, so that the client costs as little as can be."""
    found = running_digest()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        buffer = memoryview(bytearray(BUFFER_BYTES))
        began = time.perf_counter()
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        head = b""
        while b"\r\n\r\n" not in head:
            head += connection.recv(4096)
        head, _, first = head.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.") and b" 200 " in head.partition(b"\r\n")[0], head.decode()
        total = len(first)
        for part in _parts(connection, buffer, first):
            total += len(part) if part is not first else 0
            if digest:
                found.update(part)
            if keep is not None:
                keep(memoryview(part))
        return Body(total, time.perf_counter() - began, found.hexdigest() if digest else "")


def _parts(connection: socket.socket, buffer: memoryview, first: bytes) -> Iterator[bytes | memoryview]:
    yield first
    while count := connection.recv_into(buffer):
        yield buffer[:count]


def growth(pid: int) -> tuple[float, Callable[[], float]]:
    """A process's memory now in MiB, and how to ask by how much its peak has been above that since."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # forget the peak so far
    before = _status(pid, "VmRSS")
    return before, lambda: _status(pid, "VmHWM") - before


def _status(pid: int, field: str) -> float:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) / 1024


def llama(size: int, down_only: bool = False) -> dict[str, NDArray[Any]]:
    """Random tensors of a Llama of about so many bytes."""
    rng = np.random.default_rng(5)
    made: dict[str, NDArray[Any]] = {}

    def add(name: str, *shape: int) -> int:
        made[name] = np.frombuffer(rng.bytes(2 * int(np.prod(shape))), np.float16).reshape(shape)
        return made[name].nbytes

    if not down_only:
        size -= add("model.embed_tokens.weight", VOCABULARY, HIDDEN) + add("model.norm.weight", HIDDEN)
    layer = 0
    while size > 0:
        block = f"model.layers.{layer}"
        size -= add(f"{block}.mlp.down_proj.weight", HIDDEN, INNER)
        if not down_only:
            size -= sum(add(f"{block}.self_attn.{name}_proj.weight", HIDDEN, HIDDEN) for name in "qkvo")
            size -= sum(add(f"{block}.mlp.{name}_proj.weight", INNER, HIDDEN) for name in ("gate", "up"))
            size -= add(f"{block}.input_layernorm.weight", HIDDEN) + add(f"{block}.post_attention_layernorm.weight", HIDDEN)
        layer += 1
    return made


def save(root: Path, run: str, tensors: dict[str, NDArray[Any]]) -> None:
    config = {"model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": VOCABULARY}
    layers = sum("down_proj" in name for name in tensors)
    config |= {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "num_hidden_layers": layers}
    size = sum(tensor.nbytes for tensor in tensors.values())
    build(
        root / naming.checkpoint_path(run, 1),
        {"model": tensors},
        run=run,
        step=1,
        file_bytes_max=5_000_000_000,
        config=json.dumps(config).encode(),
        extent_bytes=extent_bytes(size),
    )


@contextmanager
def serving(source: str, directory: Path) -> Iterator[int]:
    """A file server in a process of its own; yields its port."""
    with subprocess.Popen([sys.executable, "-c", source, str(directory)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.terminate()


def measure(directory: Path, runs: int, shard_bytes: int, cases: list[str]) -> list[dict[str, Any]]:
    """Every case: its shard from the daemon and, as a file, from the file servers, one after the other, so many times."""
    root, files = directory / "root", directory / "files"
    root.mkdir()
    files.mkdir()
    sizes = {"whole": (2 * shard_bytes, False), "down": (2 * shard_bytes, True), "down8": (8 * shard_bytes, True)}
    sizes["half"] = (shard_bytes, False)
    for run in dict.fromkeys(CASES[case][0] for case in cases):
        save(root, run, llama(*sizes[run]))
    with ExitStack() as stack:
        daemon = stack.enter_context(running(root, listen="127.0.0.1:0"))
        port = int(daemon.url.rpartition(":")[2])
        plain, python = (stack.enter_context(serving(source, files)) for source in (_SERVER, _HTTP_SERVER))
        return [_case(case, runs, (port, plain, python), files, daemon.process.pid) for case in cases]


def _case(case: str, runs: int, ports: tuple[int, int, int], files: Path, pid: int) -> dict[str, Any]:
    run, layout, rank = CASES[case]
    path = f"/v1/runs/{run}/checkpoints/1/shard?rank={rank}&layout={quote(layout)}"
    name = case.replace(" ", "-")
    fetch(ports[0], f"/v1/runs/{run}/checkpoints/1/shard?rank={rank}&layout={quote(layout)}&group=model")  # planned, warm
    before, grown = growth(pid)
    with open(files / name, "wb") as file:
        first = fetch(ports[0], path, digest=True, keep=file.write)
    seconds: dict[str, list[float]] = {"shard": [], "FileResponse": [], "http.server": []}
    for _ in range(runs):
        for kind, port, asked in zip(seconds, ports, (path, f"/{name}", f"/{name}"), strict=True):
            body = fetch(port, asked)
            assert body.bytes == first.bytes, f"{case}: {kind} sent {body.bytes} of {first.bytes} bytes"
            seconds[kind].append(body.seconds)
    grown_mib = grown()
    for port, asked in zip(ports, (path, f"/{name}", f"/{name}"), strict=True):
        assert fetch(port, asked, digest=True).digest == first.digest, f"{case}: the bodies differ"
    (files / name).unlink()
    ratios = {kind: [b / a for a, b in zip(seconds["shard"], seconds[kind], strict=True)] for kind in list(seconds)[1:]}
    return {
        "case": case,
        "layout": layout,
        "bytes": first.bytes,
        "seconds": seconds,
        "ratios": ratios,
        "daemon_mib": before,
        "growth_mib": grown_mib,
    }


def show(rows: list[dict[str, Any]]) -> None:
    """A table: gigabytes a second of each, the shard's share of a file server's speed with its spread, memory."""
    columns = ("MiB", "shard GB/s", "FileResponse", "http.server", "ratio", "to http.server", "growth MiB")
    print(f"{'case':<16}" + "".join(f"{column:>18}" for column in columns))
    for row in rows:
        speeds = [row["bytes"] / statistics.median(row["seconds"][kind]) / 1e9 for kind in row["seconds"]]
        ratios = [f"{statistics.median(r):.2f} ({min(r):.2f}-{max(r):.2f})" for r in row["ratios"].values()]
        cells = [f"{row['bytes'] / MIB:.0f}", *(f"{speed:.2f}" for speed in speeds), *ratios, f"{row['growth_mib']:.0f}"]
        print(f"{row['case']:<16}" + "".join(f"{cell:>18}" for cell in cells))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shards", description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--bytes", type=int, default=SHARD_BYTES, help="of a shard, about (default: 512 MiB)")
    parser.add_argument("--case", action="append", choices=list(CASES), help="this one only; may be repeated")
    parser.add_argument("--at", type=Path, help="a directory on the disk to use (default: the system's for temporary files)")
    parser.add_argument("--out", type=Path, help="where the numbers go, as JSON")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.at, prefix="shards-") as directory:
        rows = measure(Path(directory), given.runs, given.bytes, given.case or list(CASES))
    show(rows)
    if given.out:
        given.out.write_text(json.dumps(rows, indent=1))
    missed = [
        row["case"]
        for row in rows
        if statistics.median(row["ratios"]["FileResponse"]) < BAR_RATIO or row["growth_mib"] >= BAR_GROWTH_MIB
    ]
    print(f"below the bar: {', '.join(missed) or 'nothing'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
