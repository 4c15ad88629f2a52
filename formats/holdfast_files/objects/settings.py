"""Finds out where a bucket is and how it is reached, from where other programs have it too: botocore reads AWS_* variables
and the profiles in ~/.aws. `keys.py` has the keys.

botocore is imported when the first bucket is opened: few trainers need it.
"""

from __future__ import annotations

import logging
import re
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from holdfast_files.objects.connections import Endpoint
from holdfast_files.objects.keys import Keys
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.installing import install

if TYPE_CHECKING:
    from collections.abc import Iterator

    from botocore.session import Session

LENDER_CONNECT_S, LENDER_ANSWER_S, LENDER_TRIES_MAX = 5.0, 10.0, 2  # of services that lend keys, such as STS
# botocore writes signatures, session tokens and answers with keys at DEBUG, also where a program asks only for botocore's
# name; and where keys could not be renewed, the answer with a traceback.
_LOUD = {
    **{f"botocore{part}": logging.WARNING for part in ("", ".auth", ".endpoint", ".hooks", ".parsers", ".utils")},
    "botocore.credentials": logging.CRITICAL,
}
_REGION = ("region", ["AWS_DEFAULT_REGION", "AWS_REGION"], None, None)  # botocore itself does not know the second


class BucketSettings(NamedTuple):
    """How a bucket is reached: by which endpoint, `Host` header, path before keys, and region."""

    endpoint: Endpoint
    host: str
    path: str
    region: str


def read(bucket: str) -> tuple[BucketSettings, Keys]:
    """The settings and keys for a bucket. `StorageFailed` if there are no keys, `InvalidRequest` for wrong settings."""
    session = _session()
    with _translated():
        url, region = _bucket_url(session, bucket)
        ca_file = session.get_config_variable("ca_bundle")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequest(
            f"the endpoint of object storage, {parts.scheme}://{parts.netloc.rpartition('@')[2]}, is no http address",
            hint="set AWS_ENDPOINT_URL_S3 to http://HOST:PORT or https://HOST:PORT",
        )
    if parts.username is not None:
        raise InvalidRequest(
            "the endpoint of object storage has a name or a password in it",
            hint="set AWS_ENDPOINT_URL_S3 to https://HOST:PORT, and the keys by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        )
    place = Endpoint(f"{parts.scheme}://{parts.netloc}", _proxy(parts.scheme, parts.netloc), ca_file or _usual_ca_file())
    settings = BucketSettings(place, parts.netloc, parts.path.rstrip("/"), region)
    return settings, Keys(_session, region)


def require() -> None:
    """Import botocore now, before it would hold up other threads; `InvalidRequest` if it is not installed."""
    _session()
    import botocore.auth
    import botocore.awsrequest
    import botocore.config  # noqa: F401


def _session() -> Session:
    try:
        import botocore.session
        from botocore.config import Config
    except ImportError as error:
        raise InvalidRequest("object storage needs the package botocore", hint=install("s3")) from error
    for name, level in _LOUD.items():
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(level)
    session = botocore.session.Session(session_vars={"region": _REGION})
    session.set_default_client_config(
        Config(
            connect_timeout=LENDER_CONNECT_S, read_timeout=LENDER_ANSWER_S, retries={"total_max_attempts": LENDER_TRIES_MAX}
        )
    )
    return session


def _bucket_url(session: Session, bucket: str) -> tuple[str, str]:
    """The URL of the bucket, as botocore would ask for it, and the region that is signed for. Nothing is sent."""
    from botocore import UNSIGNED
    from botocore.awsrequest import AWSResponse
    from botocore.compat import HTTPHeaders
    from botocore.config import Config

    client: Any = session.create_client("s3", config=Config(signature_version=UNSIGNED))
    urls: list[str] = []

    def keep(request: Any, **_: Any) -> AWSResponse:
        urls.append(request.url)
        return AWSResponse(request.url, 200, HTTPHeaders(), SimpleNamespace(stream=lambda: [b""]))

    client.meta.events.register("before-send.s3.HeadBucket", keep)
    client.head_bucket(Bucket=bucket)
    return urls[0], client.meta.region_name


def _proxy(scheme: str, netloc: str) -> str:
    if proxy_bypass(netloc):
        return ""
    proxy = getproxies().get(scheme, "")
    if proxy and "://" not in proxy:
        proxy = f"http://{proxy}"
    if proxy and urlsplit(proxy).scheme != "http":
        raise InvalidRequest(
            f"the proxy for {scheme} is of a kind that cannot be used: {urlsplit(proxy).scheme}",
            hint=f"set {scheme.upper()}_PROXY to http://HOST:PORT, or NO_PROXY to the endpoint's host",
        )
    return proxy


def _usual_ca_file() -> str | None:
    from botocore.httpsession import get_cert_path

    path: str | None = get_cert_path(True)
    return path


@contextmanager
def _translated() -> Iterator[None]:
    from botocore.exceptions import BotoCoreError, ProfileNotFound

    try:
        yield
    except ProfileNotFound as error:
        raise InvalidRequest(f"object storage: {error}", hint="set AWS_PROFILE to a profile of ~/.aws/config") from error
    except (BotoCoreError, ValueError) as error:
        why = re.sub(r"//[^/\s]*@", "//", str(error))  # a password in an endpoint
        raise InvalidRequest(
            f"the settings of object storage cannot be used: {why}",
            hint="check AWS_ENDPOINT_URL_S3, AWS_REGION and ~/.aws/config",
        ) from error
