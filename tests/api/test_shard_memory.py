"""What sending shards costs the daemon in memory: a bounded amount, whatever their size."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from holdfast_formats import naming
from holdfast_formats.digest import digest
from holdfast_formats.disk import index, manifests, packing, state_json
from holdfast_formats.disk.manifests import EXTENT_BYTES_MAX, Extent, FileEntry, Manifest, TensorEntry
from holdfast_formats.tensors import TensorSpec
from tests.daemons import running

SHARD_BYTES = 2**29
GROWTH_BYTES_MAX = 256 * 2**20
READERS = 4


def build_sparse(directory: Path) -> None:
    """A committed checkpoint with one tensor of zeros in a file that takes no room."""
    directory.mkdir(parents=True)
    spec = TensorSpec("model", "big", "F32", (SHARD_BYTES // 4096, 1024))
    plans = packing.pack([spec])
    with open(directory / plans[0].name, "wb") as file:
        file.write(plans[0].header)
        file.truncate(plans[0].bytes)
    zeros = digest(bytes(EXTENT_BYTES_MAX))
    extents = tuple(Extent(at, EXTENT_BYTES_MAX, zeros) for at in range(0, SHARD_BYTES, EXTENT_BYTES_MAX))
    placed = TensorEntry(spec.dtype, spec.shape, plans[0].name, len(plans[0].header), extents)
    small = {naming.index_file_name("model"): index.encode(plans), naming.STATE: state_json.merge(5, {}, ["model"], {0: {}})}
    files = [FileEntry(plans[0].name, plans[0].bytes, len(plans[0].header), digest(plans[0].header))]
    for name, data in small.items():
        (directory / name).write_bytes(data)
        files.append(FileEntry(name, len(data), 0, digest(data)))
    made = Manifest(
        format=manifests.FORMAT,
        run="sparse",
        step=5,
        attempt=1,
        created="2026-01-02T03:04:05Z",
        world=1,
        mesh={},
        metrics={},
        files=tuple(files),
        tensors={"model": {"big": placed}},
        aliases={},
    )
    encoded = manifests.encode(made)
    (directory / naming.MANIFEST).write_bytes(encoded)
    (directory / naming.COMMIT).write_bytes(manifests.encode_commit(made, encoded))


def status_bytes(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def length_of(url: str, params: dict[str, str]) -> int:
    """The bytes of a body that came whole; all of them behind the header were zero."""
    total = 0
    with httpx.stream("GET", url, params=params, headers={"Accept-Encoding": "identity"}, trust_env=False) as response:
        assert response.status_code == 200
        for part in response.iter_raw(2**20):
            assert total < 2**20 or not part.strip(b"\0")
            total += len(part)
        assert total == int(response.headers["content-length"])
    return total


def test_the_daemon_grows_by_a_bounded_amount(tmp_path: Path) -> None:
    """While four ranks load 768 MiB from it at a time, by rows and as a whole, the daemon's memory grows by < 256 MiB."""
    root = tmp_path / "root"
    build_sparse(root / naming.checkpoint_path("sparse", 5))
    with running(root, listen="127.0.0.1:0") as daemon, ThreadPoolExecutor(READERS) as threads:
        url = f"{daemon.url}/v1/runs/sparse/checkpoints/5/shard"
        httpx.head(url, trust_env=False).raise_for_status()
        pid = daemon.process.pid
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # forget the peak so far
        before = status_bytes(pid, "VmRSS")
        asked = [{"layout": "sharding=6:stage3:flat-param", "rank": str(rank)} for rank in (0, 2, 5)] + [{"layout": ""}]
        lengths = [done.result(180) for done in [threads.submit(length_of, url, params) for params in asked]]
        assert sum(lengths) > SHARD_BYTES * 3 // 2
        assert status_bytes(pid, "VmHWM") - before < GROWTH_BYTES_MAX
