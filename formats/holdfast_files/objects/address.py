"""Parses addresses of object storage: `s3://BUCKET/PREFIX`. What is no such address is refused with the form to write."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from typing import NamedTuple

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.printable import visible

PREFIX_BYTES_MAX = 400  # of a key's 1024: the rest is for runs, steps and files
_FORM = "write s3://BUCKET or s3://BUCKET/PREFIX"
_OTHERS = {
    "gs": "for Google Cloud Storage, write s3://BUCKET/PREFIX, with an HMAC key and "
    "AWS_ENDPOINT_URL_S3=https://storage.googleapis.com",
    "az": "Holdfast has no client for Azure Blob Storage; mount it, or use a gateway that speaks S3",
}
_SCHEMES = {"gs": "gs", "gcs": "gs", "az": "az", "azure": "az", "abfs": "az", "abfss": "az", "wasb": "az", "wasbs": "az"}
_ADDRESS = re.compile(r"(s3[an]?|gc?s|az|azure|abfss?|wasbs?):", re.IGNORECASE)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_EXPRESS = "--x-s3"


class BucketAddress(NamedTuple):
    """A place in object storage. `prefix` has no slash at its ends, and may be empty."""

    bucket: str
    prefix: str

    @property
    def label(self) -> str:
        """The address, as messages name it."""
        return f"s3://{self.bucket}/{self.prefix}" if self.prefix else f"s3://{self.bucket}"


def state_name(place: BucketAddress) -> str:
    """The name of the directory in which a daemon of this machine keeps what is its own."""
    return f"{place.bucket}-{hashlib.sha256(place.label.encode()).hexdigest()[:12]}"


def is_address(text: str) -> bool:
    """Whether this means object storage and no path, be it well written or not."""
    return _ADDRESS.match(text) is not None


def parse(text: str) -> BucketAddress:
    """The place that `s3://BUCKET/PREFIX` names; `InvalidRequest` for anything else, which never shows a password in it."""
    found = _ADDRESS.match(text)
    if found is None:
        raise _refused(visible(text), "is not an address of object storage")
    scheme, rest = found[1], text[found.end() :]
    bucket, _, prefix = rest.removeprefix("//").partition("/")
    if _has_password(rest):
        raise InvalidRequest(
            "an address of object storage has @ or : in it, and is not shown, as it may have a password in it",
            hint="write s3://BUCKET/PREFIX, and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile",
        )
    shown = visible(text)
    if scheme.lower() in _SCHEMES:
        raise InvalidRequest(f"{shown} cannot be opened", hint=_OTHERS[_SCHEMES[scheme.lower()]])
    if scheme != "s3" or not rest.startswith("//"):
        raise _refused(shown, "is not a well-formed address", _form(rest))
    _check_bucket(bucket, shown)
    prefix = prefix.removesuffix("/")
    _check_prefix(prefix, shown)
    return BucketAddress(bucket, prefix)


def _has_password(rest: str) -> bool:
    """Whether there may be one, in which there may be slashes. A port is none."""
    first = rest.lstrip("/").partition("/")[0]
    if "@" in rest or first.lower().startswith("arn:"):
        return "@" in rest
    return ":" in first and not first.rpartition(":")[2].isdecimal()


def _form(rest: str) -> str:
    """The address that was probably meant."""
    bucket, _, prefix = rest.lstrip("/").partition("/")
    meant = f"s3://{bucket}/{prefix}" if prefix else f"s3://{bucket}"
    return f"write {visible(meant)}" if _BUCKET.fullmatch(bucket) else _FORM


def _check_bucket(bucket: str, shown: str) -> None:
    if not bucket:
        raise _refused(shown, "names no bucket")
    if bucket.lower().startswith("arn:"):
        raise _refused(shown, "has an ARN where the bucket's name belongs", "write the access point's alias as the bucket")
    if bucket.endswith(_EXPRESS):
        raise _refused(
            shown, "is a directory bucket (S3 Express), which Holdfast cannot use", "choose a general-purpose bucket"
        )
    if "?" in bucket or "#" in bucket:
        raise _refused(shown, "has ? or # in it")
    if not _BUCKET.fullmatch(bucket) or ".." in bucket or _is_ip(bucket):
        raise _refused(
            shown,
            "has no possible name of a bucket",
            "a bucket's name has 3 to 63 of a-z, 0-9, - and . ; set a server's host and port by AWS_ENDPOINT_URL_S3",
        )


def _is_ip(bucket: str) -> bool:
    try:
        ipaddress.IPv4Address(bucket)
    except ValueError:
        return False
    return True


def _check_prefix(prefix: str, shown: str) -> None:
    for sign in "?#%\\":
        if sign in prefix:
            raise _refused(shown, f"has {sign} in its prefix", "write the prefix without ? # % and \\")
    if visible(prefix) != prefix:
        raise _refused(shown, "has an invisible character in its prefix")
    parts = prefix.split("/") if prefix else []
    if "" in parts or "." in parts or ".." in parts:
        raise _refused(shown, "has an empty part, . or .. in its prefix", "write a prefix such as team/checkpoints")
    if len(prefix.encode()) > PREFIX_BYTES_MAX:
        raise _refused(f"{shown[:80]}…", "has too long a prefix", f"a prefix has at most {PREFIX_BYTES_MAX} bytes")


def _refused(shown: str, why: str, hint: str = _FORM) -> InvalidRequest:
    return InvalidRequest(f"{shown or 'the address'} {why}", hint=hint)
