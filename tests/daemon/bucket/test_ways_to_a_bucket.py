"""How a daemon comes to its bucket: keys that a cluster lends and that end in a save, TLS of one's own, and a proxy."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from holdfast import Checkpointer
from holdfast_formats import naming
from tests.daemon.bucket.test_bucket_root import RUN, save, served, state_of
from tests.daemons import RunningDaemon
from tests.kit.lenders import LENT_SECRET, TOKEN, lending
from tests.kit.objects import TestBucket, moto, moto_bucket
from tests.kit.objects_proxy import EXPIRED_TOKEN, Answer, Request, faulty
from tests.kit.tls import certificate, connect_proxy, tls_before

__all__ = ["certificate", "moto", "moto_bucket"]

PROXY_PASSWORD = "password-of-the-proxy"


@pytest.fixture(autouse=True)
def settings(moto_bucket: TestBucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The settings by which daemons of this test reach its bucket."""
    for key, value in moto_bucket.server.environment().items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state-home"))


def _committed(bucket: TestBucket, step: int) -> bool:
    return f"{RUN}/{naming.COMMITS}/{naming.step_directory(step)}" in bucket.sizes()


@pytest.mark.objects
def test_a_save_outlives_the_keys_of_its_pod(
    moto_bucket: TestBucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They end when half of its requests are through: the save waits, is signed with the next ones, and commits."""
    token = tmp_path / "token"
    token.write_text(TOKEN)
    with lending(timedelta(hours=1)) as lender, faulty(moto_bucket.server.endpoint) as proxy:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{lender.url}/pod")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(token))
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        ended, files = set[str](), list[str]()

        def judge(request: Request) -> Answer | None:
            key = request.headers.get("authorization", "").partition("Credential=")[2].partition("/")[0]
            if request.kind in ("put", "part") and f"/{naming.DATA}/" in request.key:
                if files:
                    ended.add(files[0])
                files.append(key)
            return EXPIRED_TOKEN if key in ended else None

        proxy.choose = judge
        with (
            served(tmp_path / "one", moto_bucket.url) as daemon,
            Checkpointer(RUN, state_of(1), at=str(daemon.socket)) as checkpointer,
        ):
            checkpointer.save(1).result(180)
    assert _committed(moto_bucket, 1)
    assert len(set(files)) == 2 and files[-1] == lender.lent[-1] and files[0] not in files[-2:]
    assert LENT_SECRET not in daemon.log.read_text()


def test_tls_of_ones_own_through_a_proxy(
    moto_bucket: TestBucket, certificate: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A daemon trusts the authority that it is told; all it asks goes through the proxy, whose password it does not log."""
    with tls_before(moto_bucket.server.endpoint, certificate) as url, connect_proxy() as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        monkeypatch.setenv("HTTPS_PROXY", f"http://me:{PROXY_PASSWORD}@{between.address}")
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
        with served(tmp_path / "one", moto_bucket.url) as daemon:
            save(daemon, 1)
        assert _committed(moto_bucket, 1) and any(line.startswith("CONNECT ") for line in between.asked)
    assert PROXY_PASSWORD not in daemon.log.read_text()


def test_no_place_has_keys(monkeypatch: pytest.MonkeyPatch, moto_bucket: TestBucket, tmp_path: Path) -> None:
    """Where nothing answers for the instance, a start is refused by name."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(AssertionError, match="there are no keys for object storage"):
        RunningDaemon(tmp_path / "one", "--root", moto_bucket.url, "--state", str(tmp_path / "one"))
