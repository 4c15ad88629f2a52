"""How a bucket stores the objects that are written to it: encrypted by which key, and in which storage class.

Without either the bucket's own settings hold. Reading needs neither.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from holdfast_formats.errors import InvalidRequest

# An object of these is first to be brought back, for minutes or hours.
ARCHIVES = ("GLACIER", "DEEP_ARCHIVE", "ARCHIVE", "COLDLINE_ARCHIVE")
_ENCRYPTIONS = ("AES256", "aws:kms", "aws:kms:dsse")
_CLASS = re.compile(r"[A-Z0-9_]{1,64}")
_KEY = re.compile(r"[!-~]{1,2048}")


class Storing(NamedTuple):
    """Encryption and storage class; empty for what the bucket does by itself."""

    encryption: str = ""
    key: str = ""
    storage_class: str = ""

    def headers(self, *, files: bool) -> Mapping[str, str]:
        """The headers of a put. The class is that of `files` alone: control files are small, and read often."""
        named = {
            "x-amz-server-side-encryption": self.encryption,
            "x-amz-server-side-encryption-aws-kms-key-id": self.key,
            "x-amz-storage-class": self.storage_class if files else "",
        }
        return {name: value for name, value in named.items() if value}


AS_USUAL = Storing()


def storing(encryption: str = "", storage_class: str = "") -> Storing:
    """Of `AES256`, `aws:kms` or `aws:kms=KEY`, and a class such as `STANDARD_IA`. `InvalidRequest` for other text, and for
    classes out of which nothing can be read at once.
    """
    kind, equals, key = encryption.partition("=")
    if encryption and kind not in _ENCRYPTIONS:
        raise InvalidRequest(
            f"{kind[:40]!r} is no encryption of objects", hint=f"use {', '.join(_ENCRYPTIONS)} or aws:kms=KEY"
        )
    if equals and (kind == "AES256" or not _KEY.fullmatch(key)):
        raise InvalidRequest("a key is only for aws:kms, and is an ID or ARN", hint="write aws:kms=KEY")
    if storage_class and not _CLASS.fullmatch(storage_class):
        raise InvalidRequest(f"{storage_class[:40]!r} is no storage class", hint="use one such as STANDARD_IA")
    if storage_class in ARCHIVES:
        raise InvalidRequest(
            f"checkpoints in the class {storage_class} could not be read when a training restarts",
            hint="use a class that is read at once, such as STANDARD_IA or GLACIER_IR",
        )
    return Storing(kind, key, storage_class)
