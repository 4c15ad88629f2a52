"""doctor looks at a bucket: what it honours and allows, and rules that would harm checkpoints."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.terminal import bucket_checks
from holdfast.terminal.bucket_checks import LifecycleRule
from holdfast.terminal.probes import Finding
from holdfast_files.objects import address
from tests.kit.objects import BucketServer, TestBucket, moto, moto_bucket
from tests.kit.objects_proxy import faulty

__all__ = ["moto", "moto_bucket"]


@pytest.fixture(autouse=True)
def settings(moto: BucketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in moto.environment().items():
        monkeypatch.setenv(name, value)


def found(bucket: TestBucket, prefix: str = "team") -> dict[str, list[Finding]]:
    findings: dict[str, list[Finding]] = {}
    for one in bucket_checks.examine(address.parse(f"{bucket.url}/{prefix}".rstrip("/"))):
        findings.setdefault(one.name, []).append(one)
    return findings


def test_a_usual_bucket(moto_bucket: TestBucket) -> None:
    """Nothing fails, nothing stays behind, and what is missing is told with a command."""
    findings = found(moto_bucket)
    statuses = {name: [one.status for one in each] for name, each in findings.items()}
    assert statuses == {
        **{name: ["ok"] for name in ("bucket", "root", "write", "conditions", "checksum", "clock", "list", "uploads")},
        "lifecycle": ["warn"],
        "versioning": ["ok"],
        "object lock": ["ok"],
    }
    assert moto_bucket.name in findings["lifecycle"][0].advice and moto_bucket.server.endpoint in findings["bucket"][0].what
    assert moto_bucket.sizes() == {}


def rule(name: str, prefix: str, **acts: Any) -> dict[str, Any]:
    return {"ID": name, "Status": "Enabled", "Filter": {"Prefix": prefix}, **acts}


def test_rules_that_would_harm_are_named(moto_bucket: TestBucket) -> None:
    s3 = moto_bucket.server.s3
    rules = [
        rule("tidy", "", AbortIncompleteMultipartUpload={"DaysAfterInitiation": 7}),
        rule("thrift", "team/", Transitions=[{"Days": 30, "StorageClass": "GLACIER"}]),
        rule("purge", "team/llama/", Expiration={"Days": 90}),
        rule("elsewhere", "logs/", Expiration={"Days": 1}),
    ]
    s3.put_bucket_lifecycle_configuration(Bucket=moto_bucket.name, LifecycleConfiguration={"Rules": rules})
    findings = found(moto_bucket)
    assert [(one.status, one.what) for one in findings["lifecycle"]] == [
        ("ok", "a rule aborts unfinished uploads"),
        ("fail", "rule 'thrift' archives objects below 'team/'"),
        ("fail", "rule 'purge' expires objects below 'team/llama/'"),
    ]


def test_a_bucket_that_ignores_conditions(moto_bucket: TestBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty(moto_bucket.server.endpoint) as proxy:
        proxy.conditions = "ignored"
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        (conditions,) = found(moto_bucket)["conditions"]
    assert conditions.status == "warn" and "are ignored" in conditions.what and "--alone" in conditions.advice


def test_a_bucket_that_is_not_there(moto: BucketServer) -> None:
    ran = CliRunner().invoke(app, ["doctor", "--root", "s3://no-such-bucket-here/team", "--json"])
    (bucket,) = (one for one in json.loads(ran.stdout) if one["name"] == "bucket")
    assert ran.exit_code == 1 and bucket["status"] == "fail" and "aws s3 mb" in bucket["advice"]


def test_rules_are_read_in_both_forms() -> None:
    """As in the first version of the API, with a prefix of the rule, and with a filter; what is disabled does nothing."""
    text = """<LifecycleConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/">
      <Rule><ID>old</ID><Prefix>a/</Prefix><Status>Enabled</Status><Expiration><Days>1</Days></Expiration></Rule>
      <Rule><ID>both</ID><Filter><And><Prefix>b/</Prefix><Tag><Key>k</Key><Value>v</Value></Tag></And></Filter>
        <Status>Enabled</Status><Transition><Days>1</Days></Transition></Rule>
      <Rule><Filter/><Status>Enabled</Status><Expiration><ExpiredObjectDeleteMarker>true</ExpiredObjectDeleteMarker></Expiration>
        <NoncurrentVersionExpiration><NoncurrentDays>1</NoncurrentDays></NoncurrentVersionExpiration></Rule>
      <Rule><ID>off</ID><Prefix/><Status>Disabled</Status><Expiration><Days>1</Days></Expiration></Rule>
    </LifecycleConfiguration>"""
    assert bucket_checks.read_rules(ElementTree.fromstring(text)) == [
        LifecycleRule("old", "a/", False, False, ("expires",), False),
        LifecycleRule("both", "b/", True, False, ("archives",), False),
        LifecycleRule("without a name", "", False, False, (), True),
    ]
    assert bucket_checks.read_rules(None) == []


def test_versions_and_locks_keep_what_is_removed() -> None:
    place = address.parse("s3://models/team")
    on = ElementTree.fromstring("<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>")
    enabled = "<ObjectLockEnabled>Enabled</ObjectLockEnabled>"
    lock = ElementTree.fromstring(f"<ObjectLockConfiguration>{enabled}</ObjectLockConfiguration>")
    removing = [LifecycleRule("old", "", False, False, (), True)]
    assert bucket_checks.judge_versions(place, on, []).status == "warn"
    assert bucket_checks.judge_versions(place, on, removing).status == "ok"
    assert bucket_checks.judge_versions(place, None, None).status == "ok"
    assert bucket_checks.judge_lock(lock).status == "warn" and bucket_checks.judge_lock(None).status == "ok"
