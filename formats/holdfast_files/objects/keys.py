"""The keys by which a bucket is used, from where other programs have them too, and signatures with them.

botocore finds them: in variables, in profiles with all that a profile may name, and from the services that lend keys to
pods, containers and machines. Lent keys are renewed a quarter of an hour before they end. Where that fails, those that
there are serve until the server refuses them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FuturesTimeoutError
from json import JSONDecodeError
from threading import Lock, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast_formats.errors import CheckpointError, InvalidRequest, StorageFailed
from holdfast_formats.printable import visible

if TYPE_CHECKING:
    from botocore.credentials import ReadOnlyCredentials
    from botocore.session import Session

log = logging.getLogger(__name__)

RENEW_S = (
    15.0  # between two looks whether keys are to be renewed: in their last quarter of an hour, each look asks for others
)
RELOAD_S = 15.0  # between two looks for keys in place of those that ended
LOOK_MAX_S = 30.0  # a program of the user's that says the keys, or a service that lends them, may hang
WHY_CHARS_MAX = 200
_HINT = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; on a cluster, give the pod or machine a role that may "
    "use the bucket"
)

T = TypeVar("T")


class Keys:
    """Signs requests. Keys that end are replaced by those that botocore finds then. Safe for threads."""

    def __init__(self, sessions: Callable[[], Session], region: str) -> None:
        """`sessions` makes a session that remembers nothing. `StorageFailed` where there are no keys."""
        self._sessions, self._region = sessions, region
        self._lock = Lock()  # only one thread looks, and the others sign with what there is
        self._found, self._keys = _look(sessions())
        self._renewed = self._reloaded = monotonic()
        self._fails = False

    def signed(self, method: str, url: str, headers: Mapping[str, str]) -> dict[str, str]:
        """The headers with a signature. It does not cover the body: hashing a GiB takes a second, and TLS or the body's own
        checksum protect it.
        """
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.config import Config

        request = AWSRequest(method, url, headers)
        request.context["client_config"] = Config(s3={"payload_signing_enabled": False})
        S3SigV4Auth(self._current(), "s3", self._region).add_auth(request)
        return dict(request.headers.items())

    def presigned(self, url: str, seconds: int) -> str:
        """A URL that reads `url` without keys for `seconds`, as long as the keys that signed it are valid."""
        from botocore.auth import S3SigV4QueryAuth
        from botocore.awsrequest import AWSRequest

        request = AWSRequest("GET", url)
        S3SigV4QueryAuth(self._current(), "s3", self._region, expires=seconds).add_auth(request)
        return str(request.url)

    def reload(self) -> bool:
        """Look for other keys, such as in a file that was written again, each `RELOAD_S` at most; whether there are any."""
        with self._lock:
            if monotonic() - self._reloaded < RELOAD_S:
                return False
            self._reloaded = monotonic()
            before = self._keys
            self._replace(lambda: _look(self._sessions()))
            return self._keys != before

    def _current(self) -> ReadOnlyCredentials:
        if monotonic() - self._renewed >= RENEW_S and self._lock.acquire(blocking=False):
            try:
                found = self._found
                self._replace(lambda: (found, _within_limit(found.get_frozen_credentials)))
                self._renewed = monotonic()
            finally:
                self._lock.release()
        return self._keys

    def _replace(self, look: Callable[[], tuple[Any, ReadOnlyCredentials]]) -> None:
        """The caller holds the lock."""
        try:
            self._found, self._keys = look()
        except CheckpointError as error:
            if not self._fails:
                log.warning("%s; the old ones are used until they end", error)
            self._fails = True
        else:
            self._fails = False


def _look(session: Session) -> tuple[Any, ReadOnlyCredentials]:
    """Keys with their way to be renewed, and as they are now."""

    def look() -> Any:
        found = session.get_credentials()
        return found and (found, found.get_frozen_credentials())

    looked = _within_limit(look)
    if looked is None:
        raise StorageFailed("there are no keys for object storage", hint=_HINT, answer="NoCredentials")
    found, keys = looked
    return found, keys


def _within_limit(look: Callable[[], T]) -> T:
    """What `look` returns. Else an error that says why: nothing waits for it any more, or a library raised anything."""
    from botocore.exceptions import ProfileNotFound

    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(look())
        except BaseException as error:
            answer.set_exception(error)

    Thread(target=run, name="holdfast-keys", daemon=True).start()
    try:
        return answer.result(LOOK_MAX_S)
    except ProfileNotFound as error:
        raise InvalidRequest(f"object storage: {error}", hint="set AWS_PROFILE to a profile of ~/.aws/config") from error
    except Exception as error:
        failed = StorageFailed(
            f"the keys for object storage cannot be had: {_why(error)}", hint=_HINT, answer="NoCredentials"
        )
    raise failed  # without its cause, whose text may have the answer of a service in it, with keys


def _why(error: Exception) -> str:
    from botocore.parsers import ResponseParserError

    if isinstance(error, (TimeoutError, FuturesTimeoutError)) and not str(error):
        return f"nothing has answered within {LOOK_MAX_S:.0f} s"
    if isinstance(error, (ResponseParserError, JSONDecodeError, KeyError, AttributeError, TypeError)):
        return f"an answer was not understood ({type(error).__name__})"
    return visible(re.sub(r"//[^/\s]*@", "//", str(error) or type(error).__name__))[:WHY_CHARS_MAX]
