"""Keys from every place that other programs have them from, also while an upload goes on in which the first ones end."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast_files.objects import client, keys, sending
from holdfast_files.objects.client import Bucket
from holdfast_formats.errors import StorageFailed
from tests.files.objects.scripted import Said, answer, refused, scripted
from tests.kit.lenders import LENT_SECRET, TOKEN, Lender, lending
from tests.kit.objects import BucketServer, fresh_bucket
from tests.kit.objects_proxy import EXPIRED_TOKEN, Answer, Request, faulty

ETAG = 'ETag: "tag"\r\n'
PART = bytes(5 * 2**20)  # S3 takes no shorter ones but the last
OWN = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED")
PROCESS = """
import datetime, json, pathlib, sys
count = pathlib.Path(sys.argv[1])
number = int(count.read_text() if count.exists() else 0) + 1
count.write_text(str(number))
end = (datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(hours=1)).isoformat()
print(json.dumps({"Version": 1, "AccessKeyId": f"PROCESS{number}", "SecretAccessKey": "s", "Expiration": end}))
"""


class Where(NamedTuple):
    """What a place of keys is made of, and how others come to be there, if not by themselves."""

    settings: pytest.MonkeyPatch
    directory: Path
    lender: Lender
    moto: str


def _profile(where: Where) -> Callable[[], None]:
    file = where.directory / "credentials"

    def write(name: str) -> None:
        file.write_text(f"[team]\naws_access_key_id = {name}\naws_secret_access_key = s\naws_session_token = t\n")

    write("PROFILE1")
    where.settings.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    where.settings.setenv("AWS_PROFILE", "team")
    return lambda: write("PROFILE2")


def _process(where: Where) -> Callable[[], None]:
    config, program = where.directory / "config", where.directory / "keys.py"
    program.write_text(PROCESS)
    config.write_text(f"[default]\ncredential_process = {sys.executable} {program} {where.directory / 'count'}\n")
    where.settings.setenv("AWS_CONFIG_FILE", str(config))
    return _by_itself


def _web_identity(where: Where) -> Callable[[], None]:
    """As EKS gives it to a pod with a role of its ServiceAccount (IRSA)."""
    token = where.directory / "token"
    token.write_text("a-token-of-the-cluster")
    where.settings.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
    where.settings.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/holdfast")
    where.settings.setenv("AWS_ENDPOINT_URL_STS", where.moto)
    return _by_itself


def _pod(where: Where) -> Callable[[], None]:
    """EKS Pod Identity."""
    token = where.directory / "pod-token"
    token.write_text(TOKEN)
    where.settings.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{where.lender.url}/pod")
    where.settings.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(token))
    return _by_itself


def _task(where: Where) -> Callable[[], None]:
    """A task of ECS, whose address is fixed."""
    from botocore.utils import ContainerMetadataFetcher

    where.settings.setattr(ContainerMetadataFetcher, "IP_ADDRESS", where.lender.url.removeprefix("http://"))
    where.settings.setenv("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "/task")
    return _by_itself


def _instance(where: Where) -> Callable[[], None]:
    where.settings.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", where.lender.url)
    return _by_itself


def _by_itself() -> None:
    """Who is asked again says other keys."""


PLACES = {
    "profile": _profile, "program": _process, "web identity": _web_identity, "pod": _pod, "task": _task,
    "instance": _instance,
}  # fmt: skip


@pytest.fixture(autouse=True)
def clean(s3_settings: pytest.MonkeyPatch) -> None:
    """No keys but those of the test."""
    for name in OWN:
        s3_settings.delenv(name)


def _key_of(request: Request) -> str:
    return request.headers.get("authorization", "").partition("Credential=")[2].partition("/")[0]


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_an_upload_outlives_its_keys(
    place: Callable[[Where], Callable[[], None]], moto: BucketServer, s3_settings: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its later parts are signed with the next keys, and nothing is sent twice but what was refused."""
    s3_settings.setattr(keys, "RELOAD_S", 0.0)
    s3_settings.setattr(sending, "PAUSE_MAX_S", 0.01)
    with fresh_bucket(moto) as made, lending() as lender, faulty(moto.endpoint) as proxy:
        others = place(Where(s3_settings, tmp_path, lender, moto.endpoint))
        s3_settings.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        ended, used = set[str](), list[tuple[str, str]]()

        def judge(request: Request) -> Answer | None:
            used.append((request.kind, _key_of(request)))
            return EXPIRED_TOKEN if _key_of(request) in ended else None

        proxy.choose = judge
        bucket = client.opened(f"{made.url}/team")
        upload = bucket.begin_upload("file")
        first = used[0][1]
        tags = [bucket.put_part("file", upload, 1, [memoryview(PART)])]
        ended.add(first)
        others()
        tags += [bucket.put_part("file", upload, number, [memoryview(PART)]) for number in (2, 3)]
        assert bucket.complete("file", upload, [*enumerate(tags, 1)]).outcome == "done"
        bucket.close()
        assert made.sizes() == {"team/file": 3 * len(PART)}
    parts = [key for kind, key in used if kind == "part"]
    assert first and parts[:2] == [first, first] and first not in parts[2:] and len(set(parts)) == 2
    assert len(parts) == 4


def test_lent_keys_are_renewed_before_they_end(s3_settings: pytest.MonkeyPatch) -> None:
    """In their last quarter of an hour, once each while: each request would ask for others. A lender that is away then does
    not matter while the old ones are taken, and is told once, without what it answered.
    """
    with lending(timedelta(minutes=5)) as lender, scripted(Said(answer(200, b"1", ETAG))) as server:
        s3_settings.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{lender.url}/task")
        s3_settings.setenv("AWS_ENDPOINT_URL_S3", server.url)
        bucket = client.opened("s3://bucket/p")
        for _ in range(3):
            bucket.read("key")
        assert len(lender.lent) <= 2  # botocore itself renews at the first look
        s3_settings.setattr(keys, "RENEW_S", 0.0)
        bucket.read("key")
        s3_settings.setattr(keys, "RENEW_S", 3600.0)
        bucket.read("key")
        bucket.close()
    used = [one.headers["x-amz-security-token"] for one in server.requests]
    assert used[0] == used[1] == used[2] != used[3] == used[4] == f"token-{lender.lent[-1]}"


def test_a_lender_that_is_away(s3_settings: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Requests go on with the keys that there are; the log says so once, and nothing of the keys."""
    s3_settings.setattr(keys, "RENEW_S", 0.0)
    caplog.set_level(logging.DEBUG)
    with lending(timedelta(minutes=5)) as lender, scripted(Said(answer(200, b"1", ETAG))) as server:
        s3_settings.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{lender.url}/task")
        s3_settings.setenv("AWS_ENDPOINT_URL_S3", server.url)
        bucket = client.opened("s3://bucket/p")
        lender.away = True
        assert bucket.read("key") == bucket.read("key") == b"1"
        bucket.close()
    used = {one.headers["x-amz-security-token"] for one in server.requests}
    assert used == {f"token-{lender.lent[-1]}"}
    assert caplog.text.count("the old ones are used until they end") == 1 and LENT_SECRET not in caplog.text


def test_keys_that_were_good_are_waited_for(s3_settings: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another thread may find the next ones, or they come later: what was refused meanwhile is sent again."""
    s3_settings.setattr(sending, "PAUSE_MAX_S", 0.01)
    _profile(Where(s3_settings, tmp_path, None, ""))  # type: ignore[arg-type]
    read, expired = Said(answer(200, b"1", ETAG)), refused(400, "ExpiredToken")
    with scripted(read, expired, expired, read) as server:
        s3_settings.setenv("AWS_ENDPOINT_URL_S3", server.url)
        bucket = client.opened("s3://bucket/p")
        assert bucket.read("key") == bucket.read("key") == b"1"
        bucket.close()
    assert len(server.requests) == 4


def test_keys_that_never_were_good_are_refused_at_once(s3_settings: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A start does not wait for other ones."""
    _profile(Where(s3_settings, tmp_path, None, ""))  # type: ignore[arg-type]
    with scripted(refused(400, "ExpiredToken")) as server:
        s3_settings.setenv("AWS_ENDPOINT_URL_S3", server.url)
        bucket = client.opened("s3://bucket/p")
        with pytest.raises(StorageFailed, match="ExpiredToken"):
            bucket.read("key")
        bucket.close()
    assert len(server.requests) == 1


def _opened() -> Bucket:
    return client.opened("s3://bucket/p")


NO_ANSWER = Said(then="stall")
SAID_KEYS = json.dumps({"AccessKeyId": "K", "SecretAccessKey": LENT_SECRET, "Token": "T"}).encode()
STS_REFUSES = Said(
    answer(403, b"<ErrorResponse><Error><Code>AccessDenied</Code><Message>Not yours</Message></Error></ErrorResponse>")
)
STS_ODD = Said(answer(200, f"<AssumeRoleWithWebIdentityResponse><a>{LENT_SECRET}".encode()))
LENDING = {
    "an instance without a role": ("instance", Said(answer(404)), "there are no keys for object storage"),
    "no answer of an instance": ("instance", NO_ANSWER, "there are no keys for object storage"),
    "a pod is refused": ("pod", Said(answer(401, b"not you")), "Received non 200 response 401"),
    "a pod is answered in pieces": ("pod", Said(answer(200, SAID_KEYS)), r"was not understood \(KeyError\)"),
    "a pod is answered oddly": ("pod", Said(answer(200, f"{LENT_SECRET}[".encode())), "Unable to parse JSON"),
    "STS refuses": ("web identity", STS_REFUSES, "AccessDenied"),
    "STS is odd": ("web identity", STS_ODD, r"was not understood \(ResponseParserError\)"),
}


@pytest.mark.parametrize(("place", "said", "why"), LENDING.values(), ids=LENDING)
def test_a_lender_without_keys(
    place: str,
    said: Said,
    why: str,
    s3_settings: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Is refused by name after seconds, and what it said of keys is not told."""
    from botocore.utils import ContainerMetadataFetcher

    caplog.set_level(logging.DEBUG)
    s3_settings.setattr(ContainerMetadataFetcher, "SLEEP_TIME", 0)
    with scripted(said) as server:
        place_of_server = Where(s3_settings, tmp_path, server, server.url)  # type: ignore[arg-type]
        PLACES[place](place_of_server)
        with pytest.raises(StorageFailed, match=why) as failed:
            _opened()
    assert server.requests and failed.value.members["answer"] == "NoCredentials" and "AWS_PROFILE" in failed.value.hint
    assert failed.value.__cause__ is None and failed.value.__context__ is None
    assert LENT_SECRET not in str(failed.value) + caplog.text


def test_nothing_is_where_keys_are_lent(s3_settings: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No instance, no STS, no program, no file with the pod's token: each is refused by name."""
    s3_settings.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StorageFailed, match="there are no keys"):
        _opened()
    _web_identity(Where(s3_settings, tmp_path, None, "http://127.0.0.1:9"))  # type: ignore[arg-type]
    with pytest.raises(StorageFailed, match=r"Could not connect to the endpoint URL: .*127\.0\.0\.1:9"):
        _opened()
    s3_settings.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "absent"))
    with pytest.raises(StorageFailed, match="absent"):
        _opened()
    s3_settings.delenv("AWS_WEB_IDENTITY_TOKEN_FILE")
    s3_settings.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://127.0.0.1:9/pod")
    s3_settings.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "none"))
    with pytest.raises(StorageFailed, match="none"):
        _opened()


LONG_AGO = "2020-01-01T00:00:00Z"
PROGRAMS = {
    "absent": ("/absent/program", "/absent/program"),
    "fails": ("sh -c 'echo log in first >&2; exit 3'", "log in first"),
    "hangs": ("sleep 30", "nothing has answered within"),
    "says nothing": ("true", r"was not understood \(JSONDecodeError\)"),
    "says keys that have ended": (
        f"echo '{json.dumps({'Version': 1, 'AccessKeyId': 'K', 'SecretAccessKey': LENT_SECRET, 'Expiration': LONG_AGO})}'",
        "still expired",
    ),
}


@pytest.mark.parametrize(("command", "why"), PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_without_keys(command: str, why: str, s3_settings: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Is refused by name, also one that does not end."""
    if "sleep" in command:
        s3_settings.setattr(keys, "LOOK_MAX_S", 0.2)
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {command}\n")
    s3_settings.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with pytest.raises(StorageFailed, match=why) as failed:
        _opened()
    assert LENT_SECRET not in str(failed.value)
