"""Reads the answers of S3, headers and XML. They are bounded, and what no server of S3 would say is refused."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import NamedTuple
from urllib.parse import unquote_plus
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

XML_BYTES_MAX = 16 * 2**20  # a page of a thousand keys of 1024 bytes, each sign of which is escaped, and their other fields
ERROR_BYTES_MAX = 2**16


class Malformed(Exception):
    """An answer that no server of S3 gives."""


class Listed(NamedTuple):
    """An object of a list. `modified` is in seconds since 1970, by the store's clock."""

    key: str
    size: int
    etag: str
    modified: float


class KeyPage(NamedTuple):
    """Up to 1000 objects in the order of their keys, and the `prefixes` up to a delimiter; `now` by the store's clock."""

    objects: list[Listed]
    prefixes: list[str]
    now: float


class PendingUpload(NamedTuple):
    """An upload that was begun and neither completed nor aborted."""

    key: str
    id: str
    begun: float


class StoredPart(NamedTuple):
    """A part that an unfinished upload has. `crc32` as in a header, empty where the bucket does not say it."""

    number: int
    size: int
    etag: str
    crc32: str


def parsed(data: bytes, *names: str) -> Element:
    """The document, whose root has one of these names; `Malformed` for anything else, and for a document type, by which a
    few bytes could become gigabytes.
    """
    try:
        text = data.decode()
        if "<!DOCTYPE" in text or "<!ENTITY" in text:
            raise Malformed("XML with a document type")
        root = ElementTree.fromstring(text)
    except (UnicodeDecodeError, ElementTree.ParseError, ValueError) as error:
        raise Malformed(f"no XML: {data[:60]!r}") from error
    if names and local(root) not in names:
        raise Malformed(f"XML of another kind: {local(root)[:60]}")
    return root


def local(element: Element) -> str:
    """The name without its namespace, which servers disagree about."""
    return element.tag.rpartition("}")[2]


def children(element: Element, name: str) -> Iterator[Element]:
    return (child for child in element if local(child) == name)


def text(element: Element, name: str) -> str:
    """The text of a child, empty if there is none."""
    return next((child.text or "" for child in children(element, name)), "")


def is_url_encoded(root: Element) -> bool:
    return text(root, "EncodingType") == "url"


def key_of(written: str, encoded: bool) -> str:
    return unquote_plus(written) if encoded else written


def listed(root: Element) -> list[Listed]:
    """The objects of a ListBucketResult."""
    encoded = is_url_encoded(root)
    try:
        return [
            Listed(
                key_of(text(one, "Key"), encoded),
                int(text(one, "Size")),
                text(one, "ETag"),
                iso_s(text(one, "LastModified")),
            )
            for one in children(root, "Contents")
        ]
    except ValueError as error:
        raise Malformed(f"a list with a wrong number: {error}") from error


def prefixes(root: Element) -> list[str]:
    encoded = is_url_encoded(root)
    return [key_of(text(one, "Prefix"), encoded) for one in children(root, "CommonPrefixes")]


def uploads(root: Element) -> list[PendingUpload]:
    """The uploads of a ListMultipartUploadsResult."""
    encoded = is_url_encoded(root)
    try:
        return [
            PendingUpload(key_of(text(one, "Key"), encoded), text(one, "UploadId"), iso_s(text(one, "Initiated")))
            for one in children(root, "Upload")
        ]
    except ValueError as error:
        raise Malformed(f"a list with a wrong time: {error}") from error


def upload_marker(root: Element) -> list[tuple[str, str]]:
    """What the next page of uploads begins after, empty if there is none."""
    if text(root, "IsTruncated") != "true":
        return []
    key = key_of(text(root, "NextKeyMarker"), is_url_encoded(root))
    return [("key-marker", key), ("upload-id-marker", text(root, "NextUploadIdMarker"))]


def parts(root: Element) -> list[StoredPart]:
    """The parts of a ListPartsResult."""
    try:
        return [
            StoredPart(int(text(one, "PartNumber")), int(text(one, "Size")), text(one, "ETag"), text(one, "ChecksumCRC32"))
            for one in children(root, "Part")
        ]
    except ValueError as error:
        raise Malformed(f"a list of parts with a wrong number: {error}") from error


def part_marker(root: Element) -> str:
    """What the next page of parts begins after, empty if there is none."""
    return text(root, "NextPartNumberMarker") if text(root, "IsTruncated") == "true" else ""


def iso_s(written: str) -> float:
    """Seconds since 1970 of a time in a list."""
    when = datetime.fromisoformat(written.strip().replace("Z", "+00:00"))
    return (when if when.tzinfo else when.replace(tzinfo=timezone.utc)).timestamp()


def header_s(written: str | None) -> float | None:
    """Seconds since 1970 of a time in a header, None if there is none."""
    try:
        return parsedate_to_datetime(written).timestamp() if written else None
    except (ValueError, OverflowError):
        return None
