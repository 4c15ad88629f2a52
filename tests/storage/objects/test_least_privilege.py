"""Users who may do only what docs/object-storage.md says: each role can work, and cannot do more. On radosgw.

The table of roles is read out of the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from botocore.exceptions import ClientError
from typer.testing import CliRunner

from holdfast import Checkpointer
from holdfast.cli import app
from holdfast.rest.api import Api
from tests.daemons import RunningDaemon, running, wait_until
from tests.kit.objects import BucketServer, TestBucket, fresh_bucket, radosgw

__all__ = ["radosgw"]

pytestmark = pytest.mark.objects

PAGE = Path(__file__).parents[3] / "docs" / "object-storage.md"
PREFIX = "team"
OBJECT, UPLOAD = f"{PREFIX}/object", f"{PREFIX}/upload"
SECRETS = {role: f"secret-of-the-{role}-0123456789" for role in ("reader", "writer", "janitor")}


class User(NamedTuple):
    """A role's keys, as variables, and a client with them."""

    role: str
    environment: dict[str, str]
    s3: Any


def actions() -> dict[str, tuple[list[str], list[str]]]:
    """By role, what it may do with objects, and with the bucket."""
    rows = re.findall(r"^\| (reader|writer|janitor) \| (.*?) \| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    return {role: (re.findall(r"s3:\w+", objects), re.findall(r"s3:\w+", bucket)) for role, objects, bucket in rows}


def policy(bucket: str) -> str:
    statements = []
    for role, (objects, whole) in actions().items():
        user = {"Effect": "Allow", "Principal": {"AWS": [f"arn:aws:iam:::user/{role}"]}}
        if objects:
            statements.append({**user, "Action": objects, "Resource": f"arn:aws:s3:::{bucket}/{PREFIX}/*"})
        statements.append({**user, "Action": whole, "Resource": f"arn:aws:s3:::{bucket}"})
    return json.dumps({"Version": "2012-10-17", "Statement": statements})


@pytest.fixture(scope="module")
def bucket(radosgw: BucketServer) -> Iterator[TestBucket]:
    with fresh_bucket(radosgw) as made:
        made.put(OBJECT, b"object")
        made.put("elsewhere/object", b"object")
        radosgw.s3.put_bucket_policy(Bucket=made.name, Policy=policy(made.name))
        yield made


@pytest.fixture(scope="module")
def users(radosgw: BucketServer) -> dict[str, User]:
    assert radosgw.make_user is not None
    found = {}
    for role, secret in SECRETS.items():
        radosgw.make_user(role, f"key-{role}", secret)
        environment = {**radosgw.environment(), "AWS_ACCESS_KEY_ID": f"key-{role}", "AWS_SECRET_ACCESS_KEY": secret}
        found[role] = User(role, environment, radosgw.through(radosgw.endpoint, keys=(f"key-{role}", secret)))
    return found


def _part(s3: Any, name: str) -> Any:
    return s3.upload_part(Bucket=name, Key=UPLOAD, UploadId="none", PartNumber=1, Body=b"part")


READS: dict[str, Callable[[Any, str], Any]] = {
    "get": lambda s3, name: s3.get_object(Bucket=name, Key=OBJECT),
    "head": lambda s3, name: s3.head_object(Bucket=name, Key=OBJECT),
}
LISTS: dict[str, Callable[[Any, str], Any]] = {"list": lambda s3, name: s3.list_objects_v2(Bucket=name, Prefix=f"{PREFIX}/")}
WRITES: dict[str, Callable[[Any, str], Any]] = {
    "put": lambda s3, name: s3.put_object(Bucket=name, Key=f"{PREFIX}/new", Body=b"new"),
    "begin": lambda s3, name: s3.create_multipart_upload(Bucket=name, Key=UPLOAD),
    "part": _part,
    "copy": lambda s3, name: s3.copy_object(Bucket=name, Key=f"{PREFIX}/copy", CopySource={"Bucket": name, "Key": OBJECT}),
    "delete": lambda s3, name: s3.delete_object(Bucket=name, Key=OBJECT),
}
UPLOADS: dict[str, Callable[[Any, str], Any]] = {"uploads": lambda s3, name: s3.list_multipart_uploads(Bucket=name)}
ABORTS: dict[str, Callable[[Any, str], Any]] = {
    "abort": lambda s3, name: s3.abort_multipart_upload(Bucket=name, Key=UPLOAD, UploadId="none")
}
# What no role may do.
NEVER: dict[str, Callable[[Any, str], Any]] = {
    "read elsewhere": lambda s3, name: s3.get_object(Bucket=name, Key="elsewhere/object"),
    "write elsewhere": lambda s3, name: s3.put_object(Bucket=name, Key="elsewhere/new", Body=b"new"),
    "delete elsewhere": lambda s3, name: s3.delete_object(Bucket=name, Key="elsewhere/object"),
    "begin elsewhere": lambda s3, name: s3.create_multipart_upload(Bucket=name, Key="elsewhere/upload"),
    "remove the bucket": lambda s3, name: s3.delete_bucket(Bucket=name),
    "read the policy": lambda s3, name: s3.get_bucket_policy(Bucket=name),
    "change the policy": lambda s3, name: s3.put_bucket_policy(Bucket=name, Policy=policy(name)),
    "remove the policy": lambda s3, name: s3.delete_bucket_policy(Bucket=name),
    "change the ACL": lambda s3, name: s3.put_bucket_acl(Bucket=name, ACL="public-read"),
    "change versions": lambda s3, name: s3.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"}),
    "remove rules": lambda s3, name: s3.delete_bucket_lifecycle(Bucket=name),
    "change an object's ACL": lambda s3, name: s3.put_object_acl(Bucket=name, Key=OBJECT, ACL="public-read"),
}
FORBIDDEN = {
    "reader": {**WRITES, **UPLOADS, **ABORTS, **NEVER},
    "writer": {**UPLOADS, **NEVER},
    "janitor": {**READS, **{name: act for name, act in WRITES.items() if name != "part"}, "part": _part, **NEVER},
}
ALLOWED = {"reader": {**READS, **LISTS}, "writer": {**READS, **LISTS, "put": WRITES["put"]}, "janitor": {**LISTS, **UPLOADS}}


def refused(act: Callable[[Any, str], Any], s3: Any, name: str) -> bool:
    try:
        act(s3, name)
    except ClientError as error:
        return int(error.response["ResponseMetadata"]["HTTPStatusCode"]) == 403
    return False


def test_the_roles_may_do_what_the_page_says_and_no_more(bucket: TestBucket, users: dict[str, User]) -> None:
    before = bucket.sizes()
    begun = bucket.server.s3.create_multipart_upload(Bucket=bucket.name, Key=UPLOAD)["UploadId"]
    for role, s3 in ((role, user.s3) for role, user in users.items()):
        parts = refused(lambda s3, name: s3.list_parts(Bucket=name, Key=UPLOAD, UploadId=begun), s3, bucket.name)
        assert parts == (role != "janitor"), role
    bucket.server.s3.abort_multipart_upload(Bucket=bucket.name, Key=UPLOAD, UploadId=begun)
    done = [
        (role, name)
        for role, acts in FORBIDDEN.items()
        for name, act in acts.items()
        if not refused(act, users[role].s3, bucket.name)
    ]
    assert done == [] and sum(map(len, FORBIDDEN.values())) >= 40
    assert bucket.sizes() == before and bucket.uploads() == []
    for role, acts in ALLOWED.items():
        for name, act in acts.items():
            assert not refused(act, users[role].s3, bucket.name), (role, name)
    bucket.delete(f"{PREFIX}/new")


def test_a_writer_saves_and_a_reader_reads(
    bucket: TestBucket, users: dict[str, User], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer's daemon says that it cannot sweep uploads. A reader lists and verifies, cannot serve, and changes nothing.
    No secret is in a log, a command line, or the API.
    """
    root, state = f"{bucket.url}/{PREFIX}", tmp_path / "writer"
    enter(monkeypatch, users["writer"])
    with running(state, "--root", root, "--state", str(state), listen="127.0.0.1:0") as daemon, Api(daemon.url) as api:
        with Checkpointer("llama", {"model": torch.nn.Linear(30, 20)}, at=str(daemon.socket)) as checkpointer:
            checkpointer.save(1).result(180)
        wait_until(lambda: api.checkpoint("llama", 1).verified)
        wait_until(lambda: "are not swept, because they cannot be listed" in daemon.log.read_text())
        command = Path(f"/proc/{daemon.process.pid}/cmdline").read_bytes().decode()
        said = [daemon.log.read_text(), command, *(api.request("GET", path).text for path in ("/v1/nodes", "/metrics"))]
    written = {key: size for key, size in bucket.sizes().items() if ".holdfast.owner" not in key}
    enter(monkeypatch, users["reader"])
    for words in (["ls", "llama", "--root", root], ["verify", "llama@1", "--root", root]):
        ran = CliRunner().invoke(app, words)
        assert ran.exit_code == 0, ran.output
        said.append(ran.output)
    with pytest.raises(AssertionError, match="s3:PutObject") as cannot:
        RunningDaemon(tmp_path / "reader", "--root", root, "--state", str(tmp_path / "reader"))
    said.append(str(cannot.value))
    assert bucket.sizes() == written
    assert not [secret for secret in SECRETS.values() for text in said if secret in text]


def enter(monkeypatch: pytest.MonkeyPatch, user: User) -> None:
    for name, value in user.environment.items():
        monkeypatch.setenv(name, value)
