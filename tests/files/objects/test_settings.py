"""Where a bucket is, and the keys for it: from the variables and profiles that other programs use too."""

from __future__ import annotations

import builtins
import logging
from pathlib import Path
from typing import Any

import pytest

from holdfast_files.objects import client, keys, settings
from holdfast_formats.errors import InvalidRequest, StorageFailed
from holdfast_formats.installing import install
from tests.files.objects.scripted import Said, answer, refused, scripted
from tests.kit.objects import SECRET

ETAG = 'ETag: "tag"\r\n'


def _url(bucket: str = "bucket") -> str:
    found, _ = settings.read(bucket)
    return f"{found.endpoint.url}{found.path}"


@pytest.mark.parametrize(
    ("variables", "url", "region"),
    [
        ({}, "https://bucket.s3.us-east-1.amazonaws.com", "us-east-1"),
        ({"AWS_REGION": "eu-west-1"}, "https://bucket.s3.eu-west-1.amazonaws.com", "eu-west-1"),
        ({"AWS_DEFAULT_REGION": "cn-north-1"}, "https://bucket.s3.cn-north-1.amazonaws.com.cn", "cn-north-1"),
        ({"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:8333"}, "http://127.0.0.1:8333/bucket", "us-east-1"),
        ({"AWS_ENDPOINT_URL": "https://ceph.example:8443/base"}, "https://ceph.example:8443/base/bucket", "us-east-1"),
        ({"AWS_ENDPOINT_URL_S3": "http://[::1]:8333"}, "http://[::1]:8333/bucket", "us-east-1"),
    ],
)
def test_endpoints(variables: dict[str, str], url: str, region: str, s3_settings: pytest.MonkeyPatch) -> None:
    """AWS by region, with the bucket in the host's name; an endpoint of one's own, with the bucket in the path."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION"):
        s3_settings.delenv(name)
    for name, value in variables.items():
        s3_settings.setenv(name, value)
    assert _url() == (url.replace("us-east-1.", "") if not variables else url)
    assert settings.read("bucket")[0].region == region


def test_the_profile(s3_settings: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Has endpoint, region, style of addresses, authority and keys."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        s3_settings.delenv(name)
    (tmp_path / "config").write_text(
        "[profile ceph]\nregion = here\nca_bundle = /etc/our.pem\nservices = own\ns3 =\n  addressing_style = virtual\n"
        "[services own]\ns3 =\n  endpoint_url = https://ceph.example\n"
    )
    (tmp_path / "credentials").write_text("[ceph]\naws_access_key_id = key-of-ceph\naws_secret_access_key = s\n")
    s3_settings.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    s3_settings.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    s3_settings.setenv("AWS_PROFILE", "ceph")
    s3_settings.setattr(settings, "_proxy", lambda *_: "")
    found, keys = settings.read("bucket")
    assert (found.endpoint.url, found.path, found.region) == ("https://bucket.ceph.example", "", "here")
    assert found.endpoint.ca_file == "/etc/our.pem"
    assert "Credential=key-of-ceph/" in keys.signed("GET", "https://bucket.ceph.example/", {})["Authorization"]


@pytest.mark.parametrize(
    ("variables", "endpoint", "proxy"),
    [
        ({"HTTP_PROXY": "http://proxy:3128"}, "http://store:9000", "http://proxy:3128"),
        ({"http_proxy": "proxy:3128"}, "http://store:9000", "http://proxy:3128"),
        ({"HTTPS_PROXY": "http://proxy:3128"}, "http://store:9000", ""),
        ({"HTTPS_PROXY": "http://proxy:3128"}, "https://store:9000", "http://proxy:3128"),
        ({"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "store"}, "https://store:9000", ""),
        ({"HTTP_PROXY": "http://proxy:3128", "NO_PROXY": ".example,store:9000"}, "http://store:9000", ""),
    ],
)
def test_proxies(variables: dict[str, str], endpoint: str, proxy: str, s3_settings: pytest.MonkeyPatch) -> None:
    """By the variables that all programs know, and not for hosts that are excepted."""
    for name, value in variables.items():
        s3_settings.setenv(name, value)
    s3_settings.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    assert settings.read("bucket")[0].endpoint.proxy == proxy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_ENDPOINT_URL_S3", "localhost:9000"),
        ("AWS_ENDPOINT_URL_S3", "ftp://host"),
        ("AWS_ENDPOINT_URL_S3", "http://user:hunter2@host:9000"),
        ("AWS_PROFILE", "absent"),
        ("HTTP_PROXY", "socks5://user:hunter2@proxy:1080"),
    ],
)
def test_settings_that_cannot_be(name: str, value: str, s3_settings: pytest.MonkeyPatch) -> None:
    """Are refused with the variable to change, and without a password."""
    s3_settings.setenv(name, value)
    with pytest.raises(InvalidRequest) as failed:
        settings.read("bucket")
    assert name in failed.value.hint and "hunter2" not in str(failed.value)


def test_no_keys(s3_settings: pytest.MonkeyPatch) -> None:
    """The error says where they are looked for."""
    s3_settings.delenv("AWS_ACCESS_KEY_ID")
    s3_settings.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StorageFailed, match="no keys") as failed:
        client.opened("s3://bucket/p")
    assert "AWS_PROFILE" in failed.value.hint


def test_without_botocore(s3_settings: pytest.MonkeyPatch) -> None:
    """The error says what to install."""
    found = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("botocore"):
            raise ImportError(name)
        return found(name, *args, **options)

    s3_settings.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidRequest, match="botocore") as failed:
        client.opened("s3://bucket/p")
    assert failed.value.hint == install("s3")


def test_keys_that_end_are_looked_for_again(s3_settings: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program of the user's may write new ones to the file while a save goes on."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        s3_settings.delenv(name)
    file = tmp_path / "credentials"
    text = "[default]\naws_access_key_id = {}\naws_secret_access_key = s\naws_session_token = t\n"
    file.write_text(text.format("old"))
    s3_settings.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    s3_settings.setattr(keys, "RELOAD_S", 0.0)
    expired = refused(400, "ExpiredToken")
    with scripted(expired, expired, Said(answer(200, b"1", ETAG))) as server:
        s3_settings.setenv("AWS_ENDPOINT_URL_S3", server.url)
        bucket = client.opened("s3://bucket/p")
        with pytest.raises(StorageFailed, match="ExpiredToken"):  # no other keys: it is not tried again
            bucket.read("key")
        file.write_text(text.format("new"))
        assert bucket.read("key") == b"1"
        bucket.close()
    used = [one.headers["authorization"].partition("Credential=")[2].partition("/")[0] for one in server.requests]
    assert used == ["old", "old", "new"]


SAID = {
    "InvalidAccessKeyId": (refused(403, "InvalidAccessKeyId"), "AWS_PROFILE"),
    "SignatureDoesNotMatch": (refused(403, "SignatureDoesNotMatch"), "AWS_SECRET_ACCESS_KEY"),
    "AccessDenied": (refused(403, "AccessDenied"), "s3:GetObject"),
    "RequestTimeTooSkewed": (refused(403, "RequestTimeTooSkewed"), "timedatectl"),
    "PermanentRedirect": (refused(301, "PermanentRedirect", "<Region>eu-west-1</Region>"), "AWS_REGION=eu-west-1"),
    "AuthorizationHeaderMalformed": (
        refused(400, "AuthorizationHeaderMalformed", "<Region>eu-west-1</Region>"),
        "AWS_REGION=eu-west-1",
    ),
    "redirect": (Said(answer(301, headers="x-amz-bucket-region: eu-west-1\r\n")), "AWS_REGION=eu-west-1"),
    "InvalidObjectState": (refused(403, "InvalidObjectState"), "restore-object"),
    "an echo": (Said(answer(400, b"<Error><Code>X</Code><Message>Your Signature=abc</Message></Error>")), ""),
}


@pytest.mark.parametrize(("said", "hint"), SAID.values(), ids=SAID)
def test_refusals_say_what_to_do(
    said: Said, hint: str, s3_settings: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At once, and no error or log has a secret or a signature in it."""
    caplog.set_level(logging.DEBUG)
    with scripted(said) as server:
        s3_settings.setenv("AWS_ENDPOINT_URL_S3", server.url)
        bucket = client.opened("s3://bucket/p")
        with pytest.raises(StorageFailed) as failed:
            bucket.read("key")
        bucket.close()
    assert len(server.requests) == 1
    assert hint in failed.value.hint
    signature = server.requests[0].headers["authorization"].partition("Signature=")[2]
    for text in (str(failed.value), caplog.text):
        assert SECRET not in text and signature not in text and "Signature=" not in text


def test_nothing_answers(s3_settings: pytest.MonkeyPatch) -> None:
    """The error names the address that was asked."""
    bucket = client.opened("s3://bucket/p").using(retry_s=0.0)
    with pytest.raises(StorageFailed, match=r"no answer from http://127\.0\.0\.1:9 ") as failed:
        bucket.read("key")
    assert "AWS_ENDPOINT_URL_S3" in failed.value.hint
