"""A server of S3 in this process, a bucket in it, and the settings by which clients find it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from moto.server import ThreadedMotoServer

from holdfast_files.objects import client
from holdfast_files.objects.client import Bucket

SECRET = "wJalrXUtnFEMI-K7MDENG-bPxRfiCYEXAMPLEKEY"
_NUMBERS = count()


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """The URL of a server of moto."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3_settings(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> pytest.MonkeyPatch:
    """Keys in the environment, and nothing of this machine's own."""
    for name in (
        "AWS_PROFILE",
        "AWS_SESSION_TOKEN",
        "AWS_CA_BUNDLE",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "http_proxy",
        "https_proxy",
    ):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path_factory.mktemp("aws")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(home / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(home / "credentials"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return monkeypatch


@pytest.fixture
def bucket(moto: str, s3_settings: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A place of the test's own in moto."""
    import botocore.session

    s3_settings.setenv("AWS_ENDPOINT_URL_S3", moto)
    name = f"bucket-{next(_NUMBERS)}"
    botocore.session.Session().create_client("s3").create_bucket(Bucket=name)
    opened = client.opened(f"s3://{name}/team/checkpoints")
    yield opened
    opened.close()
