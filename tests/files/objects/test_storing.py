"""How objects are stored: what is refused, and what a bucket is told of each kind of object."""

from __future__ import annotations

import pytest

from holdfast_files.objects import client
from holdfast_files.objects.storing import Storing, storing
from holdfast_formats.errors import InvalidRequest
from tests.kit.objects import TestBucket, moto_bucket

__all__ = ["moto_bucket"]

KEY = "arn:aws:kms:us-east-1:123456789012:key/1234"


@pytest.mark.parametrize(
    ("encryption", "storage_class", "found"),
    [
        ("", "", Storing()),
        ("AES256", "", Storing("AES256")),
        ("aws:kms", "STANDARD_IA", Storing("aws:kms", "", "STANDARD_IA")),
        (f"aws:kms={KEY}=", "GLACIER_IR", Storing("aws:kms", f"{KEY}=", "GLACIER_IR")),
    ],
)
def test_what_is_told(encryption: str, storage_class: str, found: Storing) -> None:
    assert storing(encryption, storage_class) == found
    assert "x-amz-storage-class" not in found.headers(files=False)


@pytest.mark.parametrize(
    ("encryption", "storage_class"),
    [
        ("aes256", ""),
        ("AES256=key", ""),
        ("aws:kms=", ""),
        ("aws:kms=a\r\nx-evil: 1", ""),
        ("=key", ""),
        ("", "standard"),
        ("", "GLACIER"),
        ("", "DEEP_ARCHIVE"),
        ("", "A B"),
    ],
)
def test_what_is_refused(encryption: str, storage_class: str) -> None:
    with pytest.raises(InvalidRequest):
        storing(encryption, storage_class)


def test_what_a_bucket_is_told(moto_bucket: TestBucket, s3_settings: pytest.MonkeyPatch) -> None:
    """A put, an upload in parts, and a copy, by the bucket's own answer; all are read as any other object."""
    s3_settings.setenv("AWS_ENDPOINT_URL_S3", moto_bucket.server.endpoint)
    bucket = client.opened(moto_bucket.url)
    written = bucket.using(storing=storing("aws:kms=key-1", "STANDARD_IA").headers(files=True))
    written.put("put", b"x")
    upload = written.begin_upload("parts")
    written.complete("parts", upload, [(1, written.put_part("parts", upload, 1, [memoryview(b"x")]))])
    bucket.put("plain", b"x")
    written.copy("plain", "copied", 1)
    for key in ("put", "parts", "copied", "plain"):
        found = moto_bucket.server.s3.head_object(Bucket=moto_bucket.name, Key=key)
        told = tuple(found.get(name) for name in ("ServerSideEncryption", "SSEKMSKeyId", "StorageClass"))
        assert told == ((None,) * 3 if key == "plain" else ("aws:kms", "key-1", "STANDARD_IA")), key
        assert bucket.read(key) == b"x"
    bucket.close()
