"""The servers of S3 that tests start: what each honours is what other tests count on, and none outlives its tester."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.daemons import wait_until
from tests.kit.objects import BucketServer, TestBucket, fresh_bucket

TOP = Path(__file__).parents[2]
PART_BYTES = 5 * 2**20  # the least that a part may have, but for the last one
STARTS = """
import sys, time
from pathlib import Path
from tests.kit.objects import running_seaweedfs
with running_seaweedfs(Path(sys.argv[1])) as server:
    print(server.endpoint, flush=True)
    time.sleep(600)
"""


def status(call: Any, **arguments: Any) -> int:
    """The HTTP status of a request, whether it failed or not."""
    from botocore.exceptions import ClientError

    try:
        return int(call(**arguments)["ResponseMetadata"]["HTTPStatusCode"])
    except ClientError as refused:
        return int(refused.response["ResponseMetadata"]["HTTPStatusCode"])


def test_what_was_put_is_read_and_counted(bucket: TestBucket) -> None:
    """`used` counts parts of uploads that were not completed, too."""
    bucket.put("run/a", b"12345")
    s3 = bucket.server.s3
    upload = s3.create_multipart_upload(Bucket=bucket.name, Key="run/b")["UploadId"]
    s3.upload_part(Bucket=bucket.name, Key="run/b", UploadId=upload, PartNumber=1, Body=b"67")
    assert bucket.read("run/a") == b"12345"
    assert bucket.sizes("run/") == {"run/a": 5}
    assert bucket.uploads() == [("run/b", upload)]
    assert bucket.used() == 7


def test_a_bucket_is_gone_with_its_block(bucket_server: BucketServer) -> None:
    """Also where something is in it, and an upload has not ended: a server in memory would fill."""
    with fresh_bucket(bucket_server) as bucket:
        bucket.put("a", b"1")
        bucket_server.s3.create_multipart_upload(Bucket=bucket.name, Key="b")
    assert bucket.name not in [one["Name"] for one in bucket_server.s3.list_buckets()["Buckets"]]


def test_a_condition_of_a_put_is_honoured(bucket: TestBucket) -> None:
    """radosgw 16 takes the tag of If-Match only without its quotation marks."""
    put, name = bucket.server.s3.put_object, bucket.name
    assert status(put, Bucket=name, Key="k", Body=b"1", IfNoneMatch="*") == 200
    assert status(put, Bucket=name, Key="k", Body=b"2", IfNoneMatch="*") == 412
    tag = bucket.server.s3.head_object(Bucket=name, Key="k")["ETag"].strip('"')
    assert status(put, Bucket=name, Key="k", Body=b"3", IfMatch=tag) == 200
    assert status(put, Bucket=name, Key="k", Body=b"4", IfMatch=tag) == 412
    assert bucket.read("k") == b"3"


def test_a_condition_of_a_complete_is_honoured_but_by_radosgw(bucket: TestBucket) -> None:
    """So no commit may rest on it."""
    s3, name = bucket.server.s3, bucket.name
    bucket.put("k", b"1")
    upload = s3.create_multipart_upload(Bucket=name, Key="k")["UploadId"]
    tag = s3.upload_part(Bucket=name, Key="k", UploadId=upload, PartNumber=1, Body=b"2")["ETag"]
    parts = {"Parts": [{"PartNumber": 1, "ETag": tag}]}
    said = status(
        s3.complete_multipart_upload, Bucket=name, Key="k", UploadId=upload, MultipartUpload=parts, IfNoneMatch="*"
    )
    assert (said, bucket.read("k")) == ((200, b"2") if bucket.server.kind == "radosgw" else (412, b"1"))


def test_a_hole_in_the_numbers_of_parts_completes(bucket: TestBucket) -> None:
    """So the parts of an object are to be asked for by size afterwards."""
    s3, name, whole = bucket.server.s3, bucket.name, bytes(PART_BYTES)
    upload = s3.create_multipart_upload(Bucket=name, Key="k")["UploadId"]
    parts = [
        {
            "PartNumber": number,
            "ETag": s3.upload_part(Bucket=name, Key="k", UploadId=upload, PartNumber=number, Body=body)["ETag"],
        }
        for number, body in ((1, whole), (3, b"3"))
    ]
    s3.complete_multipart_upload(Bucket=name, Key="k", UploadId=upload, MultipartUpload={"Parts": parts})
    assert bucket.sizes() == {"k": PART_BYTES + 1}


def test_many_buckets_fit_on_a_server(bucket_server: BucketServer) -> None:
    """Each test has its own; SeaweedFS takes a volume or more for each that is written to."""
    for number in range(12):
        with fresh_bucket(bucket_server) as bucket:
            bucket.put("a", bytes([number]))
            assert bucket.read("a") == bytes([number])


def test_a_server_ends_with_a_tester_that_is_killed(tmp_path: Path) -> None:
    """It would keep its ports and 100 MB until the machine is started again."""
    command = [sys.executable, "-c", STARTS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=TOP, text=True) as tester:
        assert tester.stdout is not None
        endpoint = tester.stdout.readline().strip()
        if not endpoint:
            pytest.skip("SeaweedFS is not there")
        assert answers(endpoint)
        os.kill(tester.pid, signal.SIGKILL)
    wait_until(lambda: not answers(endpoint))


def answers(endpoint: str) -> bool:
    try:
        urllib.request.urlopen(endpoint, timeout=180).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True
