"""bench measures a bucket, and leaves nothing in it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.terminal import bucket_limits
from holdfast_files.objects import address
from holdfast_formats.errors import InvalidRequest
from tests.kit.objects import BucketServer, TestBucket, moto, moto_bucket

__all__ = ["moto", "moto_bucket"]


@pytest.fixture(autouse=True)
def settings(moto: BucketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in moto.environment().items():
        monkeypatch.setenv(name, value)


def test_rates_processor_time_and_requests(moto_bucket: TestBucket) -> None:
    """Requests are those of one write and one read: two parts, and four ranges."""
    ran = CliRunner().invoke(app, ["bench", "--root", f"{moto_bucket.url}/team", "--size-mib", "32", "--json"])
    measured = json.loads(ran.stdout)
    assert measured["requests"] == {"begin": 1, "part": 2, "complete": 1, "get": 4}
    assert min(measured[name] for name in ("write", "read", "write_cpu_s", "read_cpu_s", "usd")) > 0
    assert moto_bucket.sizes() == {} and moto_bucket.uploads() == []


def test_too_few_bytes() -> None:
    with pytest.raises(InvalidRequest, match="too few"):
        bucket_limits.measure(address.parse("s3://models"), 2**20)
