"""Measurements of `holdfast bench` for a root in a bucket: rates, processor time and requests, up and down."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np

from holdfast_files.objects import client
from holdfast_files.objects.address import BucketAddress
from holdfast_files.objects.client import Bucket
from holdfast_files.objects.probe import PROBES, probe
from holdfast_files.objects.traffic import Traffic
from holdfast_formats.errors import InvalidRequest, StorageFailed

PART_BYTES, SENDERS = 16 * 2**20, 6  # as a daemon sends them
RANGE_BYTES, READERS = 8 * 2**20, 8  # as a restore reads them
RUNS = 3


class BucketLimits(NamedTuple):
    """Bytes per second, and seconds of this process's processor for each GiB; medians of three runs.

    `requests` are those of one write and one read of `bytes`, by kind.
    """

    bytes: int
    write: float
    read: float
    write_cpu_s: float
    read_cpu_s: float
    checksum: str
    requests: Mapping[str, int]


class _Timed(NamedTuple):
    seconds: float
    cpu_s: float


def measure(place: BucketAddress, size: int, on_step: Callable[[str], None] = lambda _: None) -> BucketLimits:
    """Write an object of this many bytes, in whole parts of 16 MiB, and read it, three times; then remove it.

    Raises `InvalidRequest` for less than one part, and what the bucket raises.
    """
    if size < PART_BYTES:
        raise InvalidRequest(f"{size} bytes are too few for a measurement", hint=f"use at least {PART_BYTES}")
    size -= size % PART_BYTES
    on_step("preparing random bytes")
    source = np.random.Generator(np.random.SFC64()).integers(0, 2**64, size // 8, np.uint64).view(np.uint8)
    target = np.zeros(size, np.uint8)
    traffic = Traffic()
    bucket = client.opened(place.label)
    try:
        checksum = probe(bucket).checksum
        counted = bucket.using(checksum=checksum, traffic=traffic)
        up, down = [], []
        for _ in range(RUNS):
            key = f"{PROBES}/bench-{uuid.uuid4().hex}"
            try:
                on_step("writing to the bucket")
                up.append(_timed(partial(_write, counted, key, source.data)))
                on_step("reading from the bucket")
                down.append(_timed(partial(_read, counted, key, target.data)))
                if not np.array_equal(source, target):
                    raise StorageFailed(f"{place.label} answered other bytes than it was given", hint="use another bucket")
                target[:] = 0
            finally:
                bucket.delete([key])
    finally:
        bucket.close()
    requests = {kind: count.sent // RUNS for kind, count in traffic.by_kind().items()}
    written, read = _median(up), _median(down)
    gib = size / 2**30
    return BucketLimits(
        size, size / written.seconds, size / read.seconds, written.cpu_s / gib, read.cpu_s / gib, checksum, requests
    )


def _timed(act: Callable[[], None]) -> _Timed:
    began, cpu = time.perf_counter(), time.process_time()
    act()
    return _Timed(time.perf_counter() - began, time.process_time() - cpu)


def _median(runs: list[_Timed]) -> _Timed:
    return _Timed(*(sorted(values)[len(runs) // 2] for values in zip(*runs, strict=True)))


def _write(bucket: Bucket, key: str, data: memoryview) -> None:
    upload = bucket.begin_upload(key)
    try:
        with ThreadPoolExecutor(SENDERS) as pool:
            sent = [
                (number, pool.submit(bucket.put_part, key, upload, number, [data[at : at + PART_BYTES]]))
                for number, at in enumerate(range(0, len(data), PART_BYTES), 1)
            ]
            parts = [(number, job.result()) for number, job in sent]
        completed = bucket.complete(key, upload, parts)
    except BaseException:
        bucket.abort(key, upload)
        raise
    if completed.outcome != "done":
        raise StorageFailed(f"{bucket.label}: the upload is not known to be complete: {completed.detail}")


def _read(bucket: Bucket, key: str, target: memoryview) -> None:
    with ThreadPoolExecutor(READERS) as pool:
        jobs = [
            pool.submit(bucket.read_into, key, at, target[at : at + RANGE_BYTES])
            for at in range(0, len(target), RANGE_BYTES)
        ]
        for job in jobs:
            job.result()
