"""Finds out where a bucket is and by which keys it is used, from where other programs have it too: botocore reads AWS_*
variables, the profiles in ~/.aws, and the identities of web, container and machine.

botocore is imported when the first bucket is opened: few trainers need it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from contextlib import contextmanager
from threading import Lock
from time import monotonic
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from holdfast_files.objects.connections import Endpoint
from holdfast_formats.errors import InvalidRequest, StorageFailed
from holdfast_formats.installing import install

if TYPE_CHECKING:
    from collections.abc import Iterator

    from botocore.credentials import ReadOnlyCredentials
    from botocore.session import Session

RELOAD_S = 15.0  # between two looks for keys in place of those that ended
_REGION = ("region", ["AWS_DEFAULT_REGION", "AWS_REGION"], None, None)  # botocore itself does not know the second
_KEYS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; on a cluster, give the pod or machine a role that may "
    "use the bucket"
)


class BucketSettings(NamedTuple):
    """How a bucket is reached: by which endpoint, `Host` header, path before keys, and region."""

    endpoint: Endpoint
    host: str
    path: str
    region: str


class Keys:
    """Signs requests. Keys that end are replaced by those that botocore finds then. Safe for threads."""

    def __init__(self, session: Session, settings: BucketSettings) -> None:
        self._lock, self._region = Lock(), settings.region
        self._found, self._since = self._look(session), monotonic()

    def signed(self, method: str, url: str, headers: Mapping[str, str]) -> dict[str, str]:
        """The headers with a signature. It does not cover the body: hashing a GiB takes a second, and TLS or the body's own
        checksum protect it.
        """
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.config import Config

        request = AWSRequest(method, url, headers)
        request.context["client_config"] = Config(s3={"payload_signing_enabled": False})
        S3SigV4Auth(self._frozen(), "s3", self._region).add_auth(request)
        return dict(request.headers.items())

    def presigned(self, url: str, seconds: int) -> str:
        """A URL that reads `url` without keys for `seconds`, as long as the keys that signed it are valid."""
        from botocore.auth import S3SigV4QueryAuth
        from botocore.awsrequest import AWSRequest

        request = AWSRequest("GET", url)
        S3SigV4QueryAuth(self._frozen(), "s3", self._region, expires=seconds).add_auth(request)
        return str(request.url)

    def reload(self) -> bool:
        """Look for other keys, such as in a file that was written again, each `RELOAD_S` at most; whether there are any."""
        with self._lock:
            if monotonic() - self._since < RELOAD_S:
                return False
            self._since = monotonic()
            before = self._frozen()
            self._found = self._look(_session())
            return self._frozen() != before

    def _look(self, session: Session) -> Any:
        with _translated():
            found = session.get_credentials()
        if found is None:
            raise StorageFailed("there are no keys for object storage", hint=_KEYS, answer="NoCredentials")
        return found

    def _frozen(self) -> ReadOnlyCredentials:
        with _translated():
            frozen: ReadOnlyCredentials = self._found.get_frozen_credentials()  # which renews them before they end
        return frozen


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
    return settings, Keys(session, settings)


def require() -> None:
    """Import botocore now, before it would hold up other threads; `InvalidRequest` if it is not installed."""
    _session()
    import botocore.auth
    import botocore.awsrequest
    import botocore.config  # noqa: F401


def _session() -> Session:
    try:
        import botocore.session
    except ImportError as error:
        raise InvalidRequest("object storage needs the package botocore", hint=install("s3")) from error
    logger = logging.getLogger("botocore")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.WARNING)  # at DEBUG it would write signatures and session tokens
    return botocore.session.Session(session_vars={"region": _REGION})


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
    from botocore.exceptions import BotoCoreError, CredentialRetrievalError, ProfileNotFound

    try:
        yield
    except ProfileNotFound as error:
        raise InvalidRequest(f"object storage: {error}", hint="set AWS_PROFILE to a profile of ~/.aws/config") from error
    except CredentialRetrievalError as error:
        raise StorageFailed(f"the keys for object storage cannot be had: {error}", hint=_KEYS) from error
    except (BotoCoreError, ValueError) as error:
        why = re.sub(r"//[^/\s]*@", "//", str(error))  # a password in an endpoint
        raise InvalidRequest(
            f"the settings of object storage cannot be used: {why}",
            hint="check AWS_ENDPOINT_URL_S3, AWS_REGION and ~/.aws/config",
        ) from error
