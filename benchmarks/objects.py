"""Saves into a bucket, and restores from it, beside obstore and botocore: `python -m benchmarks.objects [--quick]`.

One checkpoint of a few files is uploaded from memory until it is durable, and downloaded into memory, by each client in
turn. Holdfast uploads as its daemon does: three threads hand over windows of two files at a time, until the commit object is
there. It does so once more without checksums of bodies, which the others do not compute either. It restores as a rank does,
and checks every byte. obstore signs no body here. botocore copies each part, for it refuses a memoryview.

The servers are SeaweedFS and, where it is installed, radosgw, which this starts, or the one at AWS_ENDPOINT_URL_S3 with a
bucket in HOLDFAST_BENCH_BUCKET. Before each download the server's files leave the page cache, where this runs as root;
radosgw keeps its objects in memory. obstore is no dependency of the project: without it, install it first.

Prints seconds of wall and of this process's processor for each GiB, medians with the least and the most, what checksums and
digests cost alone, requests, bytes read over bytes needed, and a JSON line. The exit status is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from botocore.config import Config
from botocore.session import Session

from holdfast.read.object_source import ObjectSource
from holdfast.read.reader import CheckpointReader
from holdfast.read.requests import Want
from holdfast_files.objects import checksums, client
from holdfast_files.objects.client import Bucket
from holdfast_files.objects.object_files import ObjectFiles
from holdfast_files.objects.probe import probe
from holdfast_files.objects.traffic import Traffic
from holdfast_formats import naming
from holdfast_formats.digest import digest
from holdfast_formats.naming import Place
from holdfast_formats.region import whole
from holdfast_service.daemon.writing.write_threads import WORKERS
from holdfast_service.daemon.writing.writer import FILES_MAX
from holdfast_service.storage.objects import ConditionalPuts, ObjectStore, Uploads
from holdfast_service.storage.store import CommitContents
from holdfast_service.storage.tier import FileWriter
from holdfast_service.wiring import gc_tuning
from tests.checkpoints import build
from tests.kit.objects import fresh_bucket, running_seaweedfs
from tests.kit.radosgw import PROGRAMS, running_radosgw

from .disk import drop_caches

RUN = "benchmark"
PART_BYTES = WINDOW_BYTES = 16 * 2**20
THREADS = 6  # of botocore, and of obstore's ranges: the connections of a save
FILES = 4
PAUSE_S = 3.0  # radosgw removes overwritten objects after two
CHECKED, BARE, PEERS = "holdfast", "holdfast, no checksum", ("botocore", "obstore")
Act = Callable[[], object]


class Bars(NamedTuple):
    """The least speed beside the faster of the others, the most processor seconds a GiB, the most bytes read over needed."""

    speed: float = 0.9
    processor_s: float = 0.5
    read: float = 1.05


class Wanted(NamedTuple):
    """What is measured, how often."""

    mib: int
    rounds: int


class Stored(NamedTuple):
    """A checkpoint in memory: the long files, and all others as they are committed."""

    files: Mapping[str, memoryview]
    small: Mapping[str, bytes]
    tensors: Mapping[str, np.ndarray[Any, Any]]  # memory that downloads go to
    manifest: bytes
    commit: bytes

    @property
    def size(self) -> int:
        return sum(data.nbytes for data in self.files.values())

    def parts(self) -> list[tuple[str, int, memoryview]]:
        """File, number from 0, and bytes."""
        return [
            (name, start // PART_BYTES, data[start : start + PART_BYTES])
            for name, data in self.files.items()
            for start in range(0, data.nbytes, PART_BYTES)
        ]


class Way(NamedTuple):
    """One client: `up` and `down` are measured, what is done `before` an upload is not."""

    up: Act
    down: Act
    before: Act = lambda: None


class Cost(NamedTuple):
    """Seconds for a GiB."""

    wall_s: float
    processor_s: float


class Costs(NamedTuple):
    """Of all rounds."""

    each: Sequence[Cost]

    @property
    def median(self) -> Cost:
        return Cost(*(statistics.median(column) for column in zip(*self.each, strict=True)))

    @property
    def shown(self) -> str:
        walls = [one.wall_s for one in self.each]
        return f"{self.median.wall_s:6.2f} ({min(walls):5.2f} … {max(walls):5.2f}) {self.median.processor_s:9.2f}"


class Compared(NamedTuple):
    """The costs of all ways to and from one server, the checksum of bodies, and bytes read over bytes needed."""

    kind: str
    checksum: str
    ups: Mapping[str, Costs]
    downs: Mapping[str, Costs]
    read: float

    def as_json(self) -> dict[str, Any]:
        both = {"up": self.ups, "down": self.downs}
        return {
            "checksum": self.checksum,
            "read": self.read,
            **{what: {way: [*map(list, one.each)] for way, one in costs.items()} for what, costs in both.items()},
        }


class Saver:
    """Saves of a daemon in a bucket, and restores of a rank."""

    def __init__(self, stored: Stored, bucket: Bucket, traffic: Traffic, opened: ExitStack) -> None:
        self._stored, self._bucket, self._traffic = stored, bucket, traffic
        self._uploads = Uploads(bucket)
        opened.callback(self._uploads.close)
        puts = ConditionalPuts(bucket, probe(bucket))
        self._store = ObjectStore(self._uploads, puts, ObjectFiles(bucket))
        self._step = 0
        self._pool = opened.enter_context(ThreadPoolExecutor(WORKERS))

    def up(self) -> None:
        """Until it is durable."""
        self._step += 1
        place = Place(RUN, self._step, 1)  # of a daemon alone
        staged = self._store.begin(place)
        running: deque[tuple[FileWriter, list[Future[None]]]] = deque()
        for name, data in self._stored.files.items():
            file = staged.create(name, data.nbytes)
            starts = range(0, data.nbytes, WINDOW_BYTES)
            windows = [self._pool.submit(file.write, at, [data[at : at + WINDOW_BYTES]]) for at in starts]
            running.append((file, windows))
            if len(running) == FILES_MAX:
                _finish(running)
        while running:
            _finish(running)
        sizes = {name: data.nbytes for name, data in self._stored.files.items()}
        contents = CommitContents(sizes, dict(self._stored.small), self._stored.manifest, self._stored.commit)
        assert self._store.commit(place, contents).outcome == "published"

    def down(self) -> None:
        """Into memory that is there, every byte checked."""
        reader = CheckpointReader.open(ObjectSource(self._bucket, RUN, self._step))
        entries = reader.manifest.tensors["model"]
        targets = self._stored.tensors
        wants = [Want("model", name, whole(entry.shape), targets[name]) for name, entry in entries.items()]
        reader.load(wants)

    def remove(self) -> None:
        """The newest save."""
        if self._step:
            self._store.free(self._store.remove(RUN, self._step))

    @property
    def received(self) -> int:
        """The bytes of all answers until now."""
        return sum(one.received_bytes for one in self._traffic.by_kind().values())


def _finish(running: deque[tuple[FileWriter, list[Future[None]]]]) -> None:
    """The file that was begun first."""
    file, windows = running.popleft()
    for window in windows:
        window.result()
    file.finish()


def by_botocore(name: str, stored: Stored, pool: ThreadPoolExecutor) -> Way:
    """botocore, without the checksums that it computes unasked."""
    s3: Any = Session().create_client(
        "s3",
        config=Config(
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            max_pool_connections=THREADS,
        ),
    )

    def place(file: str) -> dict[str, Any]:
        return {"Bucket": name, "Key": f"botocore/{file}"}

    def up() -> None:
        uploads = {file: s3.create_multipart_upload(**place(file))["UploadId"] for file in stored.files}

        def part(one: tuple[str, int, memoryview]) -> tuple[str, dict[str, Any]]:
            file, number, data = one
            sent = s3.upload_part(**place(file), UploadId=uploads[file], PartNumber=number + 1, Body=bytes(data))
            return file, {"PartNumber": number + 1, "ETag": sent["ETag"]}

        done = list(pool.map(part, stored.parts()))
        for file, upload in uploads.items():
            parts = [part for of, part in done if of == file]
            s3.complete_multipart_upload(**place(file), UploadId=upload, MultipartUpload={"Parts": parts})
        list(pool.map(lambda one: s3.put_object(**place(one[0]), Body=one[1]), stored.small.items()))

    def ranged(one: tuple[str, int, memoryview]) -> None:
        file, number, data = one
        start = number * PART_BYTES
        s3.get_object(**place(file), Range=f"bytes={start}-{start + data.nbytes - 1}")["Body"].read()

    return Way(up, lambda: list(pool.map(ranged, stored.parts())))


def by_obstore(name: str, stored: Stored, pool: ThreadPoolExecutor) -> Way:
    """obstore, whose own threads do the work: all files at once, or parallel ranges."""
    import obstore
    from obstore.store import S3Store

    endpoint = os.environ["AWS_ENDPOINT_URL_S3"]
    options: Any = {"allow_http": urlsplit(endpoint).scheme == "http"}
    store = S3Store(name, prefix="obstore", endpoint=endpoint, unsigned_payload=True, client_options=options)

    def put(file: str) -> None:
        obstore.put(store, file, stored.files[file], chunk_size=PART_BYTES, max_concurrency=THREADS)

    def up() -> None:
        list(pool.map(put, stored.files))
        list(pool.map(lambda one: obstore.put(store, *one), stored.small.items()))

    def ranged(one: tuple[str, int, memoryview]) -> None:
        file, number, data = one
        obstore.get_range(store, file, start=number * PART_BYTES, length=data.nbytes)

    return Way(up, lambda: list(pool.map(ranged, stored.parts())))


def made(directory: Path, mib: int) -> Stored:
    """A checkpoint of `FILES` long files."""
    elements, rng = mib * 2**20 // FILES // 16, np.random.default_rng(1)
    arrays = {f"w{at}": rng.integers(0, 2**32, (4, elements), np.uint32).view(np.float32) for at in range(FILES)}
    built = build(
        directory, {"model": arrays}, run=RUN, step=1, file_bytes_max=mib * 2**20 // FILES + 2**16, extent_bytes=2**22
    )
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    manifest, commit = files.pop(naming.MANIFEST), files.pop(naming.COMMIT)
    long = {name: memoryview(data) for name, data in files.items() if len(data) >= 2**20}
    return Stored(
        long,
        {name: data for name, data in files.items() if name not in long},
        {name: np.empty(array.shape, np.uint32) for name, array in built.arrays["model"].items()},
        manifest,
        commit,
    )


@contextmanager
def served_bucket(kind: str) -> Iterator[str]:
    """The name of a bucket to use, on a server that the environment names."""
    given = os.environ.get("HOLDFAST_BENCH_BUCKET")
    if given:
        yield given
        return
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=".", ignore_cleanup_errors=True)))
        start = running_radosgw if kind == "radosgw" else running_seaweedfs
        server = stack.enter_context(start(directory.resolve()))
        with patched(server.environment()):
            yield stack.enter_context(fresh_bucket(server)).name


@contextmanager
def patched(environment: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def cost(act: Act, size: int) -> Cost:
    """What one call costs."""
    wall, processor = time.perf_counter(), time.process_time()
    act()
    gib = size / 2**30
    return Cost((time.perf_counter() - wall) / gib, (time.process_time() - processor) / gib)


def rounds(acts: Mapping[str, Act], wanted: Wanted, size: int, between: Callable[[str], object]) -> dict[str, Costs]:
    """The costs of each, which begin in turn: a disk and its cache serve what comes later otherwise."""
    found: dict[str, list[Cost]] = {name: [] for name in acts}
    names = list(acts)
    for number in range(wanted.rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            between(name)
            one = cost(acts[name], size)
            if number:  # the first round opens connections, and imports what is imported late
                found[name].append(one)
    return {name: Costs(costs) for name, costs in found.items()}


def compared(kind: str, stored: Stored, wanted: Wanted) -> Compared:
    """All ways to and from one server."""
    with ExitStack() as stack:
        name = stack.enter_context(served_bucket(kind))
        pool = stack.enter_context(ThreadPoolExecutor(THREADS))
        savers, used = {}, ""
        for way, checked in ((CHECKED, True), (BARE, False)):
            traffic = Traffic()
            bucket = client.opened(f"s3://{name}/{'checked' if checked else 'bare'}", traffic=traffic)
            stack.callback(bucket.close)
            checksum = probe(bucket).checksum if checked else "none"
            savers[way] = Saver(stored, bucket.using(checksum=checksum), traffic, stack)
            used = used or checksum
        ways = {
            **{way: Way(saver.up, saver.down, saver.remove) for way, saver in savers.items()},
            "botocore": by_botocore(name, stored, pool),
            "obstore": by_obstore(name, stored, pool),
        }

        def rest(way: str) -> None:
            ways[way].before()
            if kind == "radosgw":
                time.sleep(PAUSE_S)
            os.sync()

        ups = rounds({way: one.up for way, one in ways.items()}, wanted, stored.size, rest)
        received = savers[CHECKED].received
        downs = rounds({w: one.down for w, one in ways.items() if w != BARE}, wanted, stored.size, lambda _: drop_caches())
        read = (savers[CHECKED].received - received) / (wanted.rounds + 1) / stored.size
        return Compared(kind, used, ups, downs, read)


def alone(stored: Stored) -> dict[str, float]:
    """Seconds of processor for a GiB: each checksum, and the digests of a restore."""
    views = [data for _, _, data in stored.parts()]
    acts: dict[str, Act] = {
        "CRC32": lambda: [checksums.crc32([view]) for view in views],
        "MD5": lambda: [checksums.md5([view]) for view in views],
        "digests": lambda: [digest(view) for view in views],
    }
    return {name: min(cost(act, stored.size).processor_s for _ in range(3)) for name, act in acts.items()}


def missed(found: Compared, checking: Mapping[str, float]) -> list[str]:
    """The bars that are missed."""
    bars, said = Bars(), []
    for what, costs in (("up", found.ups), ("down", found.downs)):
        best = min(costs[way].median.wall_s for way in PEERS)
        speed = best / costs[CHECKED].median.wall_s
        if speed < bars.speed:
            said.append(f"{found.kind}, {what}: {speed:.2f} of the faster of {' and '.join(PEERS)}, for {bars.speed}")
    ups, downs = found.ups[BARE].median.processor_s, found.downs[CHECKED].median.processor_s - checking["digests"]
    said += [
        f"{found.kind}, {what}: {seconds:.2f} s of processor a GiB, for {bars.processor_s}"
        for what, seconds in (("up", ups), ("down", downs))
        if seconds > bars.processor_s
    ]
    if found.read > bars.read:
        said.append(f"{found.kind}: {found.read:.3f} times the bytes needed were read, for {bars.read}")
    return said


def show(found: Compared) -> None:
    print(f"\n{found.kind}, checksum {found.checksum}; bytes read over needed: {found.read:.3f}")
    for what, costs in (("up", found.ups), ("down", found.downs)):
        best = min(costs[way].median.wall_s for way in PEERS)
        print(f"{what:24} {'wall':>6} {'(least … most)':>16} {'processor':>9} {'speed':>6}")
        for way, one in costs.items():
            print(f"  {way:22} {one.shown} {best / one.median.wall_s:6.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="64 MiB and 3 rounds: to try it")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--server", choices=["seaweedfs", "radosgw"], action="append")
    asked = parser.parse_args()
    wanted = Wanted(64, 3) if asked.quick else Wanted(asked.mib, asked.rounds)
    kinds = asked.server or ["seaweedfs", *(["radosgw"] if all(map(shutil.which, PROGRAMS)) else [])]
    with tempfile.TemporaryDirectory(dir=".") as directory:
        stored = made(Path(directory, "step"), wanted.mib)
    gc_tuning.settle()  # as a daemon does
    checking = alone(stored)
    print(f"{wanted.mib} MiB in {len(stored.files)} files, {wanted.rounds} rounds, load {os.getloadavg()[0]:.1f}; s a GiB")
    print(", ".join(f"{name} alone {seconds:.2f}" for name, seconds in checking.items()))
    found = [compared(kind, stored, wanted) for kind in kinds]
    for one in found:
        show(one)
    said = [line for one in found for line in missed(one, checking)]
    print("\n" + ("\n".join(f"missed: {line}" for line in said) or "all bars are met"))
    print(json.dumps({one.kind: one.as_json() for one in found} | {"alone": checking}))
    return 1 if said and not asked.quick else 0


if __name__ == "__main__":
    sys.exit(main())
