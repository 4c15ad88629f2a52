"""What Holdfast's client of S3 costs beside botocore's and obstore's: `python -m benchmarks.objects [MIB]`.

Uploads and downloads of one object by parts of 16 MiB, four at a time, from and into memory. The server is SeaweedFS, which
this starts, or the one at AWS_ENDPOINT_URL_S3 with a bucket in HOLDFAST_BENCH_BUCKET. Prints seconds of wall and of this
process's processor for each GiB, medians of rounds in which each client has its turn, and a JSON line. botocore reads each
part into new bytes and refuses a memoryview, so that it copies; obstore signs no body here either.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import obstore
from botocore.config import Config
from botocore.session import Session
from obstore.store import S3Store

from holdfast_files.objects import client
from holdfast_files.objects.checksums import Checksum
from holdfast_files.objects.client import Bucket
from tests.kit.objects import fresh_bucket, running_seaweedfs

PART_BYTES = 16 * 2**20
THREADS = 4
ROUNDS = 7
KEY = "benchmark"
Act = Callable[[], object]


class Cost(NamedTuple):
    """Seconds for a GiB."""

    wall_s: float
    processor_s: float


class Compared(NamedTuple):
    """One object's bytes, and the pool of threads that carries its parts."""

    parts: list[memoryview]
    pool: ThreadPoolExecutor

    def each(self, act: Callable[[int], object]) -> list[Any]:
        return list(self.pool.map(act, range(len(self.parts))))


def holdfast(bucket: Bucket, compared: Compared, checksum: Checksum) -> tuple[Act, Act]:
    """Holdfast's own client, whose downloads go into memory that it is given."""
    checked = bucket.using(checksum=checksum)
    memory = np.zeros(len(compared.parts) * PART_BYTES, np.uint8).data

    def up() -> None:
        upload = checked.begin_upload(KEY)
        tags = compared.each(lambda i: (i + 1, checked.put_part(KEY, upload, i + 1, [compared.parts[i]])))
        assert checked.complete(KEY, upload, tags).outcome == "done"

    def down() -> None:
        compared.each(lambda i: checked.read_into(KEY, i * PART_BYTES, memory[i * PART_BYTES : (i + 1) * PART_BYTES]))

    return up, down


def by_botocore(name: str, compared: Compared) -> tuple[Act, Act]:
    """botocore, without the checksums that it computes unasked."""
    s3: Any = Session().create_client(
        "s3",
        config=Config(
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            max_pool_connections=THREADS,
        ),
    )
    place = {"Bucket": name, "Key": KEY}

    def part(upload: str, i: int) -> dict[str, object]:
        done = s3.upload_part(**place, UploadId=upload, PartNumber=i + 1, Body=bytes(compared.parts[i]))
        return {"PartNumber": i + 1, "ETag": done["ETag"]}

    def up() -> None:
        upload = s3.create_multipart_upload(**place)["UploadId"]
        parts = compared.each(lambda i: part(upload, i))
        s3.complete_multipart_upload(**place, UploadId=upload, MultipartUpload={"Parts": parts})

    def down() -> None:
        compared.each(
            lambda i: s3.get_object(**place, Range=f"bytes={i * PART_BYTES}-{(i + 1) * PART_BYTES - 1}")["Body"].read()
        )

    return up, down


def by_obstore(name: str, compared: Compared) -> tuple[Act, Act]:
    """obstore, whose own threads do the work."""
    endpoint = os.environ["AWS_ENDPOINT_URL_S3"]
    store = S3Store(
        name,
        endpoint=endpoint,
        unsigned_payload=True,
        client_options={"allow_http": urlsplit(endpoint).scheme == "http"},
    )
    whole = memoryview(compared.parts[0].obj)

    def up() -> None:
        obstore.put(store, KEY, whole, chunk_size=PART_BYTES, max_concurrency=THREADS)

    def down() -> None:
        compared.each(lambda i: obstore.get_range(store, KEY, start=i * PART_BYTES, length=PART_BYTES))

    return up, down


@contextmanager
def served_bucket() -> Iterator[str]:
    """The name of a bucket to use, on a server that the environment names."""
    given = os.environ.get("HOLDFAST_BENCH_BUCKET")
    if given:
        yield given
        return
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=".", ignore_cleanup_errors=True)))
        server = stack.enter_context(running_seaweedfs(directory.resolve()))
        os.environ.update(server.environment())
        yield stack.enter_context(fresh_bucket(server)).name


def cost(act: Act, size: int) -> Cost:
    """What one call costs."""
    wall, processor = time.perf_counter(), time.process_time()
    act()
    gib = size / 2**30
    return Cost((time.perf_counter() - wall) / gib, (time.process_time() - processor) / gib)


def rounds(acts: dict[str, Act], size: int) -> dict[str, Cost]:
    """The median cost of each, which begin in turn: a disk and its cache serve what comes later otherwise."""
    found: dict[str, list[Cost]] = {name: [] for name in acts}
    names = list(acts)
    for number in range(ROUNDS):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found[name].append(cost(acts[name], size))
    return {
        name: Cost(statistics.median(one.wall_s for one in costs), statistics.median(one.processor_s for one in costs))
        for name, costs in found.items()
    }


def main() -> None:
    size = (int(sys.argv[1]) if len(sys.argv) > 1 else 512) * 2**20 // PART_BYTES * PART_BYTES
    data = memoryview(np.random.default_rng(1).bytes(size))
    parts = [data[start : start + PART_BYTES] for start in range(0, size, PART_BYTES)]
    with served_bucket() as name, ThreadPoolExecutor(THREADS) as pool:
        compared = Compared(parts, pool)
        bucket = client.opened(f"s3://{name}")
        ways = {
            "holdfast": holdfast(bucket, compared, "none"),
            "holdfast, CRC32": holdfast(bucket, compared, "crc32"),
            "holdfast, MD5": holdfast(bucket, compared, "md5"),
            "botocore": by_botocore(name, compared),
            "obstore": by_obstore(name, compared),
        }
        ups = rounds({way: up for way, (up, _) in ways.items()}, size)
        downs = rounds({way: down for way, (_, down) in ways.items() if "," not in way}, size)
        bucket.delete([KEY])
        bucket.close()
    print(f"{size / 2**20:.0f} MiB, parts of 16 MiB, {THREADS} at a time, {ROUNDS} rounds; seconds a GiB")
    print(f"{'client':18} {'up: wall':>9} {'processor':>9} {'down: wall':>11} {'processor':>9}")
    for way, up in ups.items():
        down = downs.get(way)
        shown = f" {down.wall_s:11.2f} {down.processor_s:9.2f}" if down else ""
        print(f"{way:18} {up.wall_s:9.2f} {up.processor_s:9.2f}{shown}")
    print(json.dumps({"up": {k: v._asdict() for k, v in ups.items()}, "down": {k: v._asdict() for k, v in downs.items()}}))


if __name__ == "__main__":
    main()
