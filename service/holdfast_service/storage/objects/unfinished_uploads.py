"""Uploads that an earlier start of a job has left below a prefix, so that what has arrived is not sent again.

A part is taken over only if its checksum in the bucket's list is that of the bytes that would be sent: its ETag where it is
an MD5, else its CRC32 where the upload has one. Any other part is sent again. So nothing is asked about what sent it, and
parts that were on their way when it ended may arrive at any time: they have the same bytes.
"""

from __future__ import annotations

import hashlib
import logging
from contextlib import suppress
from typing import NamedTuple

from holdfast_files.objects import checksums
from holdfast_files.objects.answers import PendingUpload, StoredPart
from holdfast_files.objects.client import Bucket
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError, NoSuchResource
from holdfast_formats.naming import Place

from .prefixes import erase_data

log = logging.getLogger(__name__)


class FoundUpload(NamedTuple):
    """An upload to go on with, and the parts that it has, by their numbers."""

    id: str
    parts: dict[int, StoredPart]


class UnfinishedUploads:
    """Those below one prefix, by key; of several of one object the newest. `listed` says whether they could be listed: if
    not, a file is begun again, and no upload is left for a later start.
    """

    def __init__(self, bucket: Bucket, directory: str) -> None:
        self._bucket, self._found = bucket, dict[str, PendingUpload]()
        self.listed = True
        try:
            for one in sorted(bucket.uploads(f"{directory}/"), key=lambda one: one.begun):
                self._found[one.key] = one
        except CheckpointError as error:
            self.listed = False
            log.warning("files of %s cannot be gone on with, because uploads cannot be listed: %s", directory, error.detail)

    def take(self, key: str) -> FoundUpload | None:
        """The upload of an object, once. One whose parts cannot be listed is aborted."""
        found = self._found.pop(key, None)
        if found is None:
            return None
        try:
            return FoundUpload(found.id, {one.number: one for one in self._bucket.parts(key, found.id)})
        except NoSuchResource:
            return None
        except CheckpointError as error:
            log.warning("%s is sent again, because its parts cannot be listed: %s", key, error.detail)
            with suppress(CheckpointError):  # a sweep ends it
                self._bucket.abort(key, found.id)
            return None


def has_bytes(part: StoredPart, data: memoryview) -> bool:
    """Whether a part that the bucket has is proven to have these bytes."""
    if part.size != data.nbytes:
        return False
    if part.etag.strip('"').lower() == hashlib.md5(data, usedforsecurity=False).hexdigest():
        return True
    return bool(part.crc32) and part.crc32 == checksums.crc32([data])


def erase_staged(bucket: Bucket, place: Place, directory: str) -> None:
    """Remove all that is staged at a place; of a job, also the uploads, if they can be listed: a sweep ends the others."""
    if naming.is_job_place(place):
        with suppress(CheckpointError):
            for one in bucket.uploads(f"{directory}/"):
                bucket.abort(one.key, one.id)
    erase_data(bucket, directory)
