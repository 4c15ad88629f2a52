"""Turns what object storage refuses into errors that say what to do. No text of theirs has a key or a signature in it."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from http.client import HTTPMessage
from typing import NamedTuple

from holdfast_files.objects import answers
from holdfast_files.objects.answers import Malformed
from holdfast_formats.errors import CheckpointError, NoSpace, NoSuchResource, StorageFailed
from holdfast_formats.printable import visible

MESSAGE_CHARS_MAX = 200
TRANSIENT_STATUSES = (408, 425, 429, 500, 502, 503, 504)
TRANSIENT_CODES = ("RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable", "Throttling", "RequestTimeTooSlow")
ENDED_KEYS = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired", "InvalidAccessKeyId")
DENIALS = ("AccessDenied", "AllAccessDisabled", "SignatureDoesNotMatch")
_FULL = ("QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "ServiceQuotaExceeded")
_SECRET = re.compile(r"signature|credential|authorization|security-token|secret", re.IGNORECASE)
_BY_STATUS = {401: "AccessDenied", 403: "AccessDenied", 507: "InsufficientStorage"}  # an answer to HEAD has no code

_HINTS = {
    "NoSuchBucket": "create the bucket, for example by `aws s3 mb s3://{bucket}`, or correct its name or the endpoint",
    "AllAccessDisabled": "ask the bucket's owner",
    "AccessDenied": "allow these keys {act} on this bucket in its policy; without s3:ListBucket, an object that is "
    "missing is answered so too",
    "InvalidAccessKeyId": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, to keys that this server knows",
    "SignatureDoesNotMatch": "set AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, to the secret that belongs to the access key",
    "ExpiredToken": "get new session keys: `aws sso login`, or set AWS_SESSION_TOKEN with its two keys",
    "InvalidToken": "get new session keys: `aws sso login`, or set AWS_SESSION_TOKEN with its two keys",
    "RequestTimeTooSkewed": "set the clock of this machine, for example by `timedatectl set-ntp true`",
    "InvalidObjectState": "the object was archived: `aws s3api restore-object`, and take archiving out of its rules",
    "NotImplemented": "this server lacks what Holdfast asked for",
    "SlowDown": "the bucket has more requests than it takes; try again later, or with fewer connections",
    "BadDigest": "bytes changed on their way or in memory; try again, and check the memory of this machine if it stays",
}
_ACTS = {
    "get": "s3:GetObject", "head": "s3:GetObject", "put": "s3:PutObject", "begin": "s3:PutObject", "part": "s3:PutObject",
    "complete": "s3:PutObject", "copy": "s3:GetObject and s3:PutObject", "delete": "s3:DeleteObject",
    "setting": "s3:GetLifecycleConfiguration, s3:GetBucketVersioning and s3:GetBucketObjectLockConfiguration",
    "list": "s3:ListBucket", "abort": "s3:AbortMultipartUpload", "uploads": "s3:ListBucketMultipartUploads",
    "parts": "s3:ListMultipartUploadParts",
}  # fmt: skip


class Refusal(NamedTuple):
    """An answer that is no success."""

    status: int
    code: str
    message: str = ""
    region: str = ""
    retry_after: str = ""
    now: float | None = None

    @property
    def is_transient(self) -> bool:
        return self.status in TRANSIENT_STATUSES or self.code in TRANSIENT_CODES

    @property
    def is_full(self) -> bool:
        return self.status == 507 or self.code in _FULL

    @property
    def is_usual(self) -> bool:
        """Whether it answers a question: something is not there, or a condition does not hold."""
        return self.status in (404, 409, 412, 416) and self.code != "NoSuchBucket"

    @property
    def is_unsettled(self) -> bool:
        """Whether what was asked may have been done all the same, or may be done yet."""
        return (
            (self.status >= 500 and self.status not in (501, 507))
            or self.status == 409
            or (self.status == 200 and self.is_transient)
        )

    @property
    def shown(self) -> str:
        return f"{self.status} {self.code}".strip()


class Attempted(NamedTuple):
    """What was asked, for messages: of which place, by which kind of request, for which region."""

    label: str
    bucket: str
    kind: str
    region: str
    now: float


def read(status: int, headers: HTTPMessage | Mapping[str, str], body: bytes | None) -> Refusal:
    """The refusal in an answer; a body that is not XML says nothing."""
    code = message = region = ""
    try:
        root = answers.parsed(body or b"", "Error")
    except Malformed:
        pass
    else:
        code, message, region = (answers.text(root, name) for name in ("Code", "Message", "Region"))
    region = region or headers.get("x-amz-bucket-region") or ""
    shown = "" if _SECRET.search(message) else visible(message)[:MESSAGE_CHARS_MAX]
    return Refusal(
        status,
        re.sub(r"\W", "", code)[:64] or _BY_STATUS.get(status, ""),
        shown,
        re.sub(r"[^\w-]", "", region)[:40],
        headers.get("Retry-After") or "",
        answers.header_s(headers.get("Date")),
    )


def error(refusal: Refusal, asked: Attempted) -> CheckpointError:
    """The error for a refusal. Member `answer` is its status and code, such as "403 AccessDenied"."""
    code, place = refusal.code, asked.label
    if code == "NoSuchBucket":
        return _failed(refusal, asked, f"there is no bucket {asked.bucket}")
    if code == "NoSuchUpload":
        return NoSuchResource(f"{place}: the upload does not exist any more", answer=refusal.shown)
    if refusal.status == 404 and code in ("NoSuchKey", "NoSuchVersion", "NotFound"):
        return NoSuchResource(f"{place} does not exist", answer=refusal.shown)
    if refusal.is_full:
        hint = "free space in the bucket, or ask for a larger quota"
        return NoSpace(f"{place}: the bucket is full, or its quota is reached", hint=hint, answer=refusal.shown)
    if refusal.status in (301, 307, 308) or code == "AuthorizationHeaderMalformed":
        return _elsewhere(refusal, asked)
    if code == "RequestTimeTooSkewed":
        off = "" if refusal.now is None else f" by {abs(asked.now - refusal.now):.0f} s"
        return _failed(refusal, asked, f"the clocks of this machine and of {place} differ{off}")
    if code == "InvalidObjectState":
        return _failed(refusal, asked, f"{place} is archived, and cannot be read")
    return _failed(refusal, asked, f"{place} answered {refusal.shown} to {asked.kind}")


def unreachable(cause: BaseException, asked: Attempted, url: str) -> StorageFailed:
    """The error for a request that got no answer."""
    hint = "check AWS_ENDPOINT_URL_S3, the region, the proxy (HTTPS_PROXY, NO_PROXY) and the network"
    if isinstance(cause, ssl.SSLCertVerificationError):
        hint = "set AWS_CA_BUNDLE to a file with the certificate of the server's authority"
    elif isinstance(cause, ssl.SSLError):
        hint = "if the server speaks plain http, write http:// in AWS_ENDPOINT_URL_S3"
    why = visible(str(cause) or type(cause).__name__)[:MESSAGE_CHARS_MAX]
    if isinstance(cause, TimeoutError):
        why = "it was silent for too long"
    return StorageFailed(f"{asked.label}: no answer from {url} to {asked.kind}: {why}", hint=hint, answer="none")


def strange(why: str, asked: Attempted) -> StorageFailed:
    """The error for an answer that no server of S3 gives."""
    hint = "check that AWS_ENDPOINT_URL_S3 is the address of a server of S3, and that no proxy answers in its place"
    return StorageFailed(f"{asked.label}: a strange answer to {asked.kind}: {visible(why)}", hint=hint, answer="strange")


def _elsewhere(refusal: Refusal, asked: Attempted) -> StorageFailed:
    if refusal.region and refusal.region != asked.region:
        what = f"the bucket {asked.bucket} is in the region {refusal.region}, not in {asked.region}"
        hint = f"set AWS_REGION={refusal.region}, or the region of the profile"
    else:
        what = f"the bucket {asked.bucket} is at another address than {asked.label} was asked at ({refusal.shown})"
        hint = "set AWS_REGION to the bucket's region, and AWS_ENDPOINT_URL_S3 to its own address"
    return StorageFailed(what, hint=hint, answer=refusal.shown)


def _failed(refusal: Refusal, asked: Attempted, what: str) -> StorageFailed:
    hint = _HINTS.get(refusal.code, "").format(bucket=asked.bucket, act=_ACTS.get(asked.kind, ""))
    more = f": {refusal.message}" if refusal.message and refusal.code not in _HINTS else ""
    return StorageFailed(f"{what}{more}", hint=hint, answer=refusal.shown)
