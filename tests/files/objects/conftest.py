"""A place in a bucket, on each server of S3 that the tests have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast_files.objects import client
from holdfast_files.objects.client import Bucket
from tests.kit.objects import (
    BucketServer,
    TestBucket,
    bucket_server,
    fresh_bucket,
    moto,
    radosgw,
    seaweedfs,
)

__all__ = ["bucket_server", "moto", "radosgw", "seaweedfs"]
OTHERS = ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_CA_BUNDLE", "AWS_ENDPOINT_URL", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


@pytest.fixture
def s3_settings(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Keys in the environment, and nothing of this machine's own."""
    for name in OTHERS:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name, value in BucketServer("none", "http://127.0.0.1:9").environment().items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.fixture
def stored(bucket_server: BucketServer, s3_settings: pytest.MonkeyPatch) -> Iterator[TestBucket]:
    """An empty bucket on each server in turn, which `client.opened` finds."""
    s3_settings.setenv("AWS_ENDPOINT_URL_S3", bucket_server.endpoint)
    with fresh_bucket(bucket_server) as made:
        yield made


@pytest.fixture
def bucket(stored: TestBucket) -> Iterator[Bucket]:
    """A place in that bucket."""
    opened = client.opened(f"{stored.url}/team/checkpoints")
    yield opened
    opened.close()
