"""Addresses of object storage: what is one, and what is refused with the form to write."""

from __future__ import annotations

import pytest

from holdfast_files.objects import address
from holdfast_files.objects.address import BucketAddress
from holdfast_formats.errors import InvalidRequest


@pytest.mark.parametrize(
    ("text", "bucket", "prefix"),
    [
        ("s3://bucket", "bucket", ""),
        ("s3://bucket/", "bucket", ""),
        ("s3://my-bucket.1/team/checkpoints", "my-bucket.1", "team/checkpoints"),
        ("s3://bucket/team/", "bucket", "team"),
        ("s3://bucket/Ä é~=+&$", "bucket", "Ä é~=+&$"),
        ("s3://" + 63 * "b", 63 * "b", ""),
    ],
)
def test_addresses(text: str, bucket: str, prefix: str) -> None:
    """A bucket and a prefix, which may be empty; the label is the address again."""
    assert address.is_address(text)
    assert address.parse(text) == BucketAddress(bucket, prefix)
    assert address.parse(address.parse(text).label) == BucketAddress(bucket, prefix)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("s3:/bucket/p", "write s3://bucket/p"),
        ("s3:bucket/p", "write s3://bucket/p"),
        ("s3:///bucket/p", "write s3://BUCKET"),
        ("s3://", "write s3://BUCKET"),
        ("s3:", "write s3://BUCKET"),
        ("S3://bucket/p", "write s3://bucket/p"),
        ("s3a://bucket", "write s3://bucket"),
        ("gs://bucket/p", "storage.googleapis.com"),
        ("gcs://bucket/p", "storage.googleapis.com"),
        ("az://container/p", "Azure"),
        ("abfss://container@account/p", "set AWS_ACCESS_KEY_ID"),
        ("s3://bucket/p?versionId=1", "without ?"),
        ("s3://bucket/p#part", "without ?"),
        ("s3://bucket?x", "write s3://BUCKET"),
        ("s3://bucket/a%20b", "without ?"),
        ("s3://bucket/a\\b", "without ?"),
        ("s3://bucket/../other", "such as team/checkpoints"),
        ("s3://bucket/./p", "such as team/checkpoints"),
        ("s3://bucket//p", "such as team/checkpoints"),
        ("s3://bucket/p//", "such as team/checkpoints"),
        ("s3://bucket/a\nb", "write s3://BUCKET"),
        ("s3://bucket/" + 401 * "p", "at most 400 bytes"),
        ("s3://Bucket/p", "has 3 to 63"),
        ("s3://ab", "has 3 to 63"),
        ("s3://" + 64 * "b", "has 3 to 63"),
        ("s3://-bucket", "has 3 to 63"),
        ("s3://bucket_1", "has 3 to 63"),
        ("s3://a..b", "has 3 to 63"),
        ("s3://10.0.0.1/bucket", "AWS_ENDPOINT_URL_S3"),
        ("s3://minio:9000/bucket", "AWS_ENDPOINT_URL_S3"),
        ("s3://arn:aws:s3:eu-west-1:1:accesspoint/a", "alias"),
        ("s3://bucket--use1-az4--x-s3/p", "general-purpose"),
        ("bucket/p", "write s3://BUCKET"),
        ("", "write s3://BUCKET"),
    ],
)
def test_what_is_refused(text: str, hint: str) -> None:
    """With the form to write."""
    with pytest.raises(InvalidRequest) as refused:
        address.parse(text)
    assert hint in refused.value.hint
    assert "\n" not in refused.value.detail


@pytest.mark.parametrize(
    "text", ["s3://AKIA:hunter2@bucket/p", "s3:/AKIA:hunter2@bucket", "s3://u:hunter2/x@bucket", "S3://:hunter2@bucket"]
)
def test_passwords_are_not_shown(text: str) -> None:
    """They would end in logs, where the address is refused."""
    with pytest.raises(InvalidRequest) as refused:
        address.parse(text)
    assert "hunter2" not in str(refused.value) and "AWS_SECRET_ACCESS_KEY" in refused.value.hint


@pytest.mark.parametrize("text", ["/data/s3", "data", "./s3:x", "s3", "hf://x", "http://host:1", "file:///x", "~/gs"])
def test_paths_are_none(text: str) -> None:
    """They are read as before."""
    assert not address.is_address(text)
