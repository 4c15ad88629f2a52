"""The client of S3: the requests that Holdfast makes of a bucket, and their answers as values.

botocore signs them and knows keys and endpoints; http.client sends bodies out of the memory that they are in, and receives
into the memory that they are for. Requests that are safe to repeat are repeated here while patience lasts: reads, lists,
deletions, parts, and plain puts of the same bytes. A put with a condition, and the completion of an upload, are sent once:
after a lost answer their outcome is "unknown", and the caller reads back what stands.

Decision: a client of our own, for a dozen requests. It sends parts out of the memory that they are in and in any order,
reads ranges into the memory of tensors, sees every status, and lists uploads. Seconds of processor a GiB, up and down,
on two busy cores: 0.35 and 0.30; botocore 1.65 and 0.66, for it refuses a memoryview; obstore 0.26 and 0.75, but it
keeps the buffers that it is given, sends what is in them later, and neither lists nor completes uploads. Would change
our mind: a library with all that.

Every body carries a checksum that the server checks. Content-MD5 is the one that all servers know, and costs 1.4 s of
processor a GiB; CRC32 costs 0.2 s (0.5 without `native_crc32.c`), and old servers ignore it, so that it is used where the
bucket was seen to check it (`Bucket.checks_crc32`). No option says which: only the bucket can tell, and the slower
one of two that it checks has no use. A signature over the body would cost 0.6 to 0.9 s. So bodies are not signed, over
http either.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from http.client import HTTPResponse
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import quote
from xml.etree import ElementTree
from xml.etree.ElementTree import Element
from xml.sax.saxutils import escape

from holdfast_files.objects import address, answers, checksums, connections, refusals, settings
from holdfast_files.objects.address import BucketAddress
from holdfast_files.objects.answers import XML_BYTES_MAX, KeyPage, Malformed, PendingUpload, StoredPart
from holdfast_files.objects.checksums import Checksum
from holdfast_files.objects.connections import read_whole
from holdfast_files.objects.refusals import Refusal
from holdfast_files.objects.sending import ObjectRequest, Patience, Sender, Unsettled
from holdfast_files.objects.settings import BucketSettings
from holdfast_files.objects.traffic import Traffic
from holdfast_formats.errors import CheckpointError, InvalidRequest, LimitExceeded, NoSuchResource, StorageFailed

RETRY_S = 15.0  # unless a caller has other patience
SILENCE_S = 30.0
ASSEMBLY_SILENCE_S = 300.0  # of a server that puts parts together, or copies
READ_BYTES_MAX = 2**30  # of one answer that is returned as bytes
KEY_BYTES_MAX = 1024
KEYS_MAX = 1000  # of one list, and of one deletion
COPY_BYTES_MAX = 5 * 2**30  # of one request
COPY_PART_BYTES = 2**30  # of a larger object: parts in which a server can report progress
PARTS_MAX = 10_000
_WRITER = "x-amz-meta-holdfast-writer"
_BINARY = {"Content-Type": "application/octet-stream"}
_AS_USUAL: Mapping[str, str] = MappingProxyType({})

T = TypeVar("T")


class Found(NamedTuple):
    """An object that exists. `modified` and `now` are of the same answer, in seconds since 1970 by the store's clock.
    `writer` is what its put gave as such.
    """

    size: int
    etag: str
    modified: float
    now: float
    writer: str = ""


class WriteOutcome(NamedTuple):
    """The outcome of a write. "exists": its condition did not hold. "unknown": it may have been done or not; `detail` says
    why that is not known.
    """

    outcome: Literal["done", "exists", "unknown"]
    etag: str = ""
    detail: str = ""


class Bucket:
    """The objects below one address; keys are relative to its prefix. Safe for threads.

    All methods raise `StorageFailed` where the bucket refuses or does not answer, `NoSpace` where it is full, and
    `NoSuchResource` for an object or upload that is not there. Member `answer` of an error is status and code of the
    answer, such as "403 AccessDenied".
    """

    def __init__(
        self,
        place: BucketAddress,
        sender: Sender,
        patience: Patience,
        checksum: Checksum = "md5",
        storing: Mapping[str, str] = _AS_USUAL,
    ) -> None:
        """`storing` are the headers by which the bucket is told how to store what is written (`storing.py`)."""
        self.address, self.label = place, place.label
        self._sender, self._patience, self._checksum, self._storing = sender, patience, checksum, storing
        self._prefix = f"{place.prefix}/" if place.prefix else ""

    def using(
        self,
        *,
        retry_s: float | None = None,
        traffic: Traffic | None = None,
        checksum: Checksum | None = None,
        storing: Mapping[str, str] | None = None,
    ) -> Bucket:
        """The same bucket and connections, with other patience for what is safe to repeat, one counter more, another
        checksum of bodies, or other headers for what is written.
        """
        old = self._patience
        patience = Patience(
            old.retry_s if retry_s is None else retry_s, old.silence_s, (*old.traffic, *([traffic] if traffic else []))
        )
        stored = self._storing if storing is None else storing
        return Bucket(self.address, self._sender, patience, checksum or self._checksum, stored)

    def close(self) -> None:
        """End waits, and close connections. The bucket is not used afterwards."""
        self._sender.close()

    def head(self, key: str) -> Found | None:
        """Size, tag and times of an object, None if it is not there. A bucket that is not there is `StorageFailed`."""
        request = ObjectRequest("head", "HEAD", self._whole(key))
        while True:
            found = self._ask(request, key, _found)
            if not isinstance(found, Refusal):
                return found
            if found.status != 404:
                raise self._error(found, request, key)
            try:  # an answer to HEAD does not say whether it is the object or the bucket that is missing
                self.read(key, 0, 1)
            except NoSuchResource:
                return None

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of an object; fewer than `length` only at its end."""
        if length == 0:
            return b""
        data: bytes | None = b""
        data = self._read(key, offset, length, lambda response: _bytes_of(response, offset, length), data)
        if data is None:
            raise LimitExceeded(f"{self.label}/{key} has over {READ_BYTES_MAX} bytes", hint="read it in ranges")
        return data

    def read_tagged(self, key: str, bytes_max: int) -> tuple[bytes, str]:
        """Bytes and tag of one answer; `LimitExceeded`, before it is read, for an object of more than `bytes_max` bytes."""
        request = ObjectRequest("get", "GET", self._whole(key))

        def take(response: HTTPResponse) -> tuple[bytes | None, str]:
            return read_whole(response, bytes_max), _etag(response)

        data, etag = self._done(request, key, take)
        if data is None:
            raise LimitExceeded(
                f"{self.label}/{key} has over {bytes_max} bytes", hint="it was not written by Holdfast, or was damaged"
            )
        return data, etag

    def read_into(self, key: str, offset: int, buffer: Any) -> int:
        """Fill the buffer with bytes of an object; their number, fewer than it holds only at the object's end."""
        view = memoryview(buffer).cast("B")
        if not view.nbytes:
            return 0

        def take(response: HTTPResponse) -> int:
            _check_range(response, offset, view.nbytes)
            return connections.read_into(response, view)

        return self._read(key, offset, view.nbytes, take, 0)

    def put(
        self,
        key: str,
        data: bytes | memoryview,
        *,
        if_absent: bool = False,
        if_match: str | None = None,
        writer: str = "",
    ) -> WriteOutcome:
        """Write an object whole: always, only if there is none, or only if it has the tag. Without a condition it is "done",
        or an error. `writer` is kept with the object, so that its writer knows it again when an answer was lost.
        """
        view = memoryview(data).cast("B")
        headers = {**_BINARY, **self._storing, **checksums.headers(self._checksum, [view])}
        headers |= ({_WRITER: writer} if writer else {}) | ({"If-None-Match": "*"} if if_absent else {})
        if if_match is not None:
            headers["If-Match"] = if_match.strip('"') if self._sender.bare_tags.is_set() else if_match
        request = ObjectRequest("put", "PUT", self._whole(key), headers=headers, body=[view])
        once = if_absent or if_match is not None
        try:
            etag = self._ask(request, key, _etag, once)
        except Unsettled as unsettled:
            return WriteOutcome("unknown", detail=str(unsettled))
        if not isinstance(etag, Refusal):
            return WriteOutcome("done", etag)
        if once and (etag.status == 412 or (if_match is not None and etag.code == "NoSuchKey")):
            if _wants_bare_tags(self, key, headers.get("If-Match", "")):
                return self.put(key, data, if_match=if_match, writer=writer)
            return WriteOutcome("exists", detail=etag.shown)
        raise self._error(etag, request, key)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that do not exist are fine."""
        if len(keys) == 1:
            request = ObjectRequest("delete", "DELETE", self._whole(keys[0]))
            answer = self._ask(request, keys[0], _nothing)
            if isinstance(answer, Refusal) and answer.code != "NoSuchKey":
                raise self._error(answer, request, keys[0])
            return
        for start in range(0, len(keys), KEYS_MAX):
            _delete_many(self, keys[start : start + KEYS_MAX])

    def pages(self, prefix: str, after: str = "", delimiter: str = "") -> Iterator[KeyPage]:
        """Objects whose keys begin with `prefix` and come after `after`, page by page, as many as there are."""
        whole = f"{self._prefix}{prefix}"
        query = [("encoding-type", "url"), ("list-type", "2"), ("max-keys", str(KEYS_MAX)), ("prefix", whole)]
        if delimiter:
            query.append(("delimiter", delimiter))
        begin = [("start-after", f"{self._prefix}{after}")] if after else []
        token, cut = "", len(self._prefix)
        while True:
            more = [("continuation-token", token)] if token else begin
            request = ObjectRequest("list", "GET", query=sorted(query + more))
            page, following = self._done(request, prefix, lambda response: _page(response, whole, cut))
            yield page
            if not following:
                return
            if following == token:
                raise self._strange("the next page of a list is the same page", request, prefix)
            token = following

    def begin_upload(self, key: str) -> str:
        """Begin an object in parts; the upload's id."""
        headers = {**_BINARY, **self._storing}
        if self._checksum == "crc32":
            headers |= {"x-amz-checksum-algorithm": "CRC32", "x-amz-checksum-type": "FULL_OBJECT"}
        request = ObjectRequest("begin", "POST", self._whole(key), [("uploads", "")], headers, body=[])
        root = self._done(request, key, lambda response: _document(response, "InitiateMultipartUploadResult"))
        upload = answers.text(root, "UploadId")
        if not upload:
            raise self._strange("an upload without an id", request, key)
        return upload

    def put_part(self, key: str, upload: str, number: int, views: Sequence[memoryview]) -> str:
        """Send one part, the views one after the other, which do not change until this returns (I19); its tag."""
        assert 1 <= number <= PARTS_MAX
        query = [("partNumber", str(number)), ("uploadId", upload)]
        request = ObjectRequest("part", "PUT", self._whole(key), query, checksums.headers(self._checksum, views), body=views)
        return self._done(request, key, _etag)

    def complete(self, key: str, upload: str, parts: Sequence[tuple[int, str]]) -> WriteOutcome:
        """Make the object of its parts, by number and tag. Never "exists"; "unknown" where the object and the upload have to
        be looked at. Some servers do not say the object's tag.
        """
        body = _completion(parts)
        request = ObjectRequest(
            "complete", "POST", self._whole(key), [("uploadId", upload)], _XML, [body], silence_s=ASSEMBLY_SILENCE_S
        )
        try:
            root = self._ask(
                request, key, lambda r: _late(_document(r, "CompleteMultipartUploadResult", "Error")), once=True
            )
        except Unsettled as unsettled:
            return WriteOutcome("unknown", detail=str(unsettled))
        if not isinstance(root, Refusal):
            return WriteOutcome("done", answers.text(root, "ETag"))
        if root.is_transient or root.code == "NoSuchUpload":
            return WriteOutcome("unknown", detail=root.shown)
        raise self._error(root, request, key)

    def abort(self, key: str, upload: str) -> None:
        """Give up an upload; one that does not exist is fine."""
        request = ObjectRequest("abort", "DELETE", self._whole(key), [("uploadId", upload)])
        answer = self._ask(request, key, _nothing)
        if isinstance(answer, Refusal) and answer.code not in ("NoSuchUpload", "NoSuchKey"):
            raise self._error(answer, request, key)

    def checks_crc32(self, key: str) -> bool:
        """Whether the bucket refuses a part whose CRC32 is wrong, and completes an upload whose parts have right ones. It
        can then stand for the MD5, which costs far more. An object of a few bytes may be left at the key.
        """
        summed, right, upload = self.using(checksum="crc32"), memoryview(b"bytes"), ""
        headers = {"x-amz-checksum-crc32": checksums.crc32([memoryview(b"other bytes")])}
        try:
            upload = summed.begin_upload(key)
            query = [("partNumber", "1"), ("uploadId", upload)]
            answer = self._ask(ObjectRequest("part", "PUT", self._whole(key), query, headers, [right]), key, _etag)
            if not isinstance(answer, Refusal) or answer.status != 400:
                return False
            tag = summed.put_part(key, upload, 1, [right])
            if self.complete(key, upload, [(1, tag)]).outcome == "done":
                upload = ""
            return not upload  # some servers want the sums of all parts once more, which would have to be kept
        except StorageFailed as error:
            if str(error.members.get("answer", "")).startswith(("400", "501")):
                return False
            raise
        finally:
            if upload:
                self.abort(key, upload)

    def uploads(self, prefix: str) -> Iterator[PendingUpload]:
        """Uploads that were begun below a prefix and are neither completed nor given up."""
        whole = f"{self._prefix}{prefix}"
        marker: list[tuple[str, str]] = []
        while True:
            # Not encoded: radosgw 16 would escape keys here, without saying that it did.
            query = [("max-uploads", str(KEYS_MAX)), ("prefix", whole), ("uploads", ""), *marker]
            request = ObjectRequest("uploads", "GET", query=sorted(query))
            root = self._done(request, prefix, lambda response: _document(response, "ListMultipartUploadsResult"))
            found = [
                one for one in answers.uploads(root) if one.key.startswith(whole)
            ]  # some servers do not heed the prefix
            yield from (one._replace(key=one.key[len(self._prefix) :]) for one in found)
            following = answers.upload_marker(root)
            if not following:
                return
            if following == marker:
                raise self._strange("the next page of uploads is the same page", request, prefix)
            marker = following

    def parts(self, key: str, upload: str) -> Iterator[StoredPart]:
        """The parts that an unfinished upload has, by their numbers; `NoSuchResource` if there is no such upload."""
        marker = "0"
        while marker:
            query = [("max-parts", str(KEYS_MAX)), ("part-number-marker", marker), ("uploadId", upload)]
            request = ObjectRequest("parts", "GET", self._whole(key), query)
            root = self._done(request, key, lambda response: _document(response, "ListPartsResult"))
            yield from answers.parts(root)
            marker, before = answers.part_marker(root), marker
            if marker == before:
                raise self._strange("the next page of parts is the same page", request, key)

    def copy(self, source: str, key: str, size: int) -> None:
        """Copy an object of `size` bytes on the server, in parts where it is larger than what one request copies."""
        where = {"x-amz-copy-source": quote(f"{self.address.bucket}/{self._whole(source)}", safe="/~-._")}
        if size <= COPY_BYTES_MAX:
            request = ObjectRequest("copy", "PUT", self._whole(key), headers={**where, **self._storing}, body=[])
            self._copied(request, key, "CopyObjectResult")
            return
        _copy_in_parts(self, where, key, size)

    def presign(self, key: str, seconds: int) -> str:
        """A URL that reads this object for `seconds` without keys. It contains a signature, so it is never logged."""
        return self._sender.keys.presigned(self._sender.url(self._whole(key)), seconds)

    def _copied(self, request: ObjectRequest, key: str, name: str) -> str:
        """The tag of a copy. Its answer begins with 200 before it is done, and may then say that it failed."""
        request = request._replace(silence_s=ASSEMBLY_SILENCE_S)
        root = self._done(request, key, lambda response: _late(_document(response, name, "Error")))
        return answers.text(root, "ETag")

    def _whole(self, key: str) -> str:
        whole = f"{self._prefix}{key}"
        if not key or key.startswith("/") or len(whole.encode()) > KEY_BYTES_MAX:
            raise InvalidRequest(f"{key[:80]!r} is no key of an object", hint="use a relative path of at most 1024 bytes")
        return whole

    def _read(self, key: str, offset: int, length: int | None, take: Callable[[HTTPResponse], T | Refusal], empty: T) -> T:
        end = "" if length is None else str(offset + length - 1)
        headers = {} if not offset and length is None else {"Range": f"bytes={offset}-{end}"}
        request = ObjectRequest("get", "GET", self._whole(key), headers=headers)
        answer = self._ask(request, key, take)
        if isinstance(answer, Refusal):
            if answer.status == 416:
                return empty  # there is nothing from the offset on
            raise self._error(answer, request, key)
        return answer

    def _done(self, request: ObjectRequest, key: str, take: Callable[[HTTPResponse], T | Refusal]) -> T:
        answer = self._ask(request, key, take)
        if isinstance(answer, Refusal):
            raise self._error(answer, request, key)
        return answer

    def _ask(
        self, request: ObjectRequest, key: str, take: Callable[[HTTPResponse], T | Refusal], once: bool = False
    ) -> T | Refusal:
        return self._sender.ask(request, take, self._patience, f"{self.label}/{key}", once)

    def _error(self, refusal: Refusal, request: ObjectRequest, key: str) -> CheckpointError:
        return refusals.error(refusal, self._sender.asked(request, f"{self.label}/{key}"))

    def _strange(self, why: str, request: ObjectRequest, key: str) -> CheckpointError:
        return refusals.strange(why, self._sender.asked(request, f"{self.label}/{key}"))


_CONTENT_RANGE = re.compile(r"bytes[ =](?P<first>\d+)-(?P<last>\d+)/(?P<total>\d+|\*)")
_XMLNS = "http://s3.amazonaws.com/doc/2006-03-01/"
_XML = {"Content-Type": "application/xml"}


def opened(text: str, *, traffic: Traffic | None = None) -> Bucket:
    """The bucket at an address `s3://BUCKET/PREFIX`. Nothing is asked of it yet.

    Raises `InvalidRequest` for other text and for settings that cannot be used, `StorageFailed` where there are no keys.
    """
    place = address.parse(text)
    found, keys = settings.read(place.bucket)
    patience = Patience(RETRY_S, SILENCE_S, [traffic] if traffic else [])
    return Bucket(place, Sender(place.bucket, found, keys), patience)


def place_of(bucket: Bucket) -> BucketSettings:
    """How the bucket is reached."""
    return bucket._sender.settings


def setting(bucket: Bucket, name: Literal["lifecycle", "versioning", "object-lock"]) -> Element | None:
    """A setting of the whole bucket, as its XML; None if it has none. Raises what the methods of `Bucket` raise."""
    request = ObjectRequest("setting", "GET", query=[(name, "")])
    answer = bucket._ask(request, f"?{name}", _document)
    if not isinstance(answer, Refusal):
        return answer
    if answer.status == 404 and answer.code != "NoSuchBucket":
        return None
    raise bucket._error(answer, request, f"?{name}")


def _wants_bare_tags(bucket: Bucket, key: str, etag: str) -> bool:
    """Whether an If-Match failed for its quotes alone, as it does with radosgw 16; they are left out from then on."""
    if not etag.startswith('"'):
        return False
    found = bucket.head(key)
    if found is not None and found.etag == etag:
        bucket._sender.bare_tags.set()
        return True
    return False


def _delete_many(bucket: Bucket, keys: Sequence[str]) -> None:
    body = _deletion([bucket._whole(key) for key in keys])
    headers = {**_XML, "Content-MD5": checksums.md5([body])}
    request = ObjectRequest("delete", "POST", "", [("delete", "")], headers, [body])
    root = bucket._done(request, "", lambda response: _document(response, "DeleteResult"))
    for one in answers.children(root, "Error"):
        refusal = Refusal(200, answers.text(one, "Code"), answers.text(one, "Message"))
        if refusal.code != "NoSuchKey":
            raise bucket._error(refusal, request, answers.text(one, "Key").removeprefix(bucket._prefix))


def _copy_in_parts(bucket: Bucket, where: Mapping[str, str], key: str, size: int) -> None:
    """Copy on the server what the headers `where` name."""
    part_bytes = max(COPY_PART_BYTES, -(-size // PARTS_MAX))
    upload = bucket.begin_upload(key)
    try:
        parts = []
        for number, start in enumerate(range(0, size, part_bytes), 1):
            query = [("partNumber", str(number)), ("uploadId", upload)]
            headers = {**where, "x-amz-copy-source-range": f"bytes={start}-{min(start + part_bytes, size) - 1}"}
            request = ObjectRequest("copy", "PUT", bucket._whole(key), query, headers, [])
            parts.append((number, bucket._copied(request, key, "CopyPartResult")))
        completed = bucket.complete(key, upload, parts)
        found = bucket.head(key) if completed.outcome == "unknown" else None
        if completed.outcome != "done" and (found is None or found.size != size):
            raise StorageFailed(f"{bucket.label}/{key}: the copy is not known to be complete: {completed.detail}")
    except CheckpointError:
        with suppress(CheckpointError):
            bucket.abort(key, upload)
        raise


def _found(response: HTTPResponse) -> Found:
    # Of an answer to HEAD, http.client takes the length for none.
    length = response.headers.get("Content-Length", "")
    if not length.isdecimal():
        raise Malformed("an object without a length")
    modified = answers.header_s(response.headers.get("Last-Modified"))
    if modified is None:
        raise Malformed("an object without a time")
    now = answers.header_s(response.headers.get("Date"))
    writer = response.headers.get(_WRITER, "")
    return Found(int(length), _etag(response), modified, modified if now is None else now, writer)


def _etag(response: HTTPResponse) -> str:
    etag = response.headers.get("ETag")
    if not etag:
        raise Malformed("no ETag")
    return etag


def _nothing(response: HTTPResponse) -> None:
    """A success has no body that is wanted."""


def _check_range(response: HTTPResponse, offset: int, length: int | None) -> None:
    """`Malformed` for an answer with other bytes than those from the offset on, or fewer, before the object's end."""
    _etag(response)
    if response.status != 206:
        if offset:
            raise Malformed("all of an object for a range of it")
        return
    stated = response.headers.get("Content-Range", "")
    found = _CONTENT_RANGE.fullmatch(stated)
    end = 0 if found is None else int(found["last"]) + 1
    is_whole = found is not None and (found["total"] == str(end) or end - offset == length)
    if found is None or int(found["first"]) != offset or not is_whole:
        raise Malformed(f"the range {stated[:60]!r} for one from {offset} on")


def _bytes_of(response: HTTPResponse, offset: int, length: int | None) -> bytes | None:
    _check_range(response, offset, length)
    if length is None:
        return read_whole(response, READ_BYTES_MAX)
    return connections.read_first(response, length)


def _document(response: HTTPResponse, *names: str) -> Element:
    data = read_whole(response, XML_BYTES_MAX)
    if data is None:
        raise Malformed("an answer that is too long")
    return answers.parsed(data, *names)


def _page(response: HTTPResponse, whole: str, cut: int) -> tuple[KeyPage, str]:
    """A page of a list, without the first `cut` characters of its keys, and the token of the next one."""
    root = _document(response, "ListBucketResult")
    objects, prefixes = answers.listed(root), answers.prefixes(root)
    if not all(key.startswith(whole) for key in (*(one.key for one in objects), *prefixes)):
        raise Malformed("a list of keys that were not asked for")
    following = answers.text(root, "NextContinuationToken") if answers.text(root, "IsTruncated") == "true" else ""
    page = KeyPage(
        [one._replace(key=one.key[cut:]) for one in objects],
        [prefix[cut:] for prefix in prefixes],
        answers.header_s(response.headers.get("Date")) or 0.0,
    )
    return page, following


def _completion(parts: Sequence[tuple[int, str]]) -> memoryview:
    listed = "".join(
        f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(etag)}</ETag></Part>" for number, etag in sorted(parts)
    )
    return memoryview(f'<CompleteMultipartUpload xmlns="{_XMLNS}">{listed}</CompleteMultipartUpload>'.encode())


def _deletion(keys: Sequence[str]) -> memoryview:
    objects = "".join(f"<Object><Key>{escape(key)}</Key></Object>" for key in keys)
    return memoryview(f'<Delete xmlns="{_XMLNS}"><Quiet>true</Quiet>{objects}</Delete>'.encode())


def _late(root: Element) -> Element | Refusal:
    """The refusal in an answer that began with 200, because copying and putting parts together take long."""
    return refusals.read(200, {}, ElementTree.tostring(root)) if answers.local(root) == "Error" else root
