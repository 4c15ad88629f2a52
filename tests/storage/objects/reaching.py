"""How a test reaches a bucket on a server by the code under test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from holdfast_files.objects import client
from holdfast_files.objects.address import BucketAddress
from holdfast_files.objects.client import Bucket
from tests.kit.objects import TestBucket


@contextmanager
def opened(bucket: TestBucket, monkeypatch: pytest.MonkeyPatch, endpoint: str | None = None) -> Iterator[Bucket]:
    """All of the bucket, for the length of a block; through an `endpoint` before its server, if there is one."""
    for name, value in bucket.server.environment(endpoint).items():
        monkeypatch.setenv(name, value)
    found = client.opened(bucket.url)
    try:
        yield found
    finally:
        found.close()


def below(bucket: Bucket, prefix: str) -> Bucket:
    """A prefix of the bucket, by the same connections."""
    return Bucket(BucketAddress(bucket.address.bucket, prefix), bucket._sender, bucket._patience)
