"""Routes: manifest, tensors and files of a checkpoint. Every byte is verified before it is sent (I7)."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import PurePosixPath
from typing import Annotated, Any

import zstandard
from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from holdfast_formats import naming
from holdfast_formats.digest import digest
from holdfast_formats.disk import verification
from holdfast_formats.disk.manifests import stated_sha256
from holdfast_formats.disk.verification import Piece
from holdfast_formats.errors import NoSuchResource
from holdfast_formats.rest import bodies
from holdfast_service.api import problems
from holdfast_service.api.access.authorization import needs
from holdfast_service.api.content import delivery, open_checkpoints
from holdfast_service.api.content.delivery import Delivery
from holdfast_service.api.content.open_checkpoints import Contents, OpenedCheckpoints
from holdfast_service.api.services import URL_S, Cursor, Limit, Services, Urls, Wired

_CHECKPOINT = "/runs/{run}/checkpoints/{step}"
_MEDIA_TYPES = {".json": "application/json", ".txt": "text/plain; charset=utf-8"}

router = APIRouter(prefix="/v1", tags=["contents"], responses=problems.RESPONSES)
_ANY_FILE: dict[str, Any] = {kind: {} for kind in ("application/octet-stream", "application/json", "text/plain")}
_BYTES: dict[int | str, dict[str, Any]] = {
    200: {"content": _ANY_FILE},
    206: {"description": "The bytes of the range", "content": _ANY_FILE},
}


def _opened(request: Request) -> OpenedCheckpoints:
    opened = request.app.state.opened
    assert isinstance(opened, OpenedCheckpoints)
    return opened


def _held(request: Request, services: Wired, run: str, step: str) -> Contents:
    return _opened(request).open(run, open_checkpoints.find(services, run, step).step)


Held = Annotated[Contents, Depends(_held)]


@router.get(f"{_CHECKPOINT}/manifest", dependencies=needs("read"), response_class=Response, summary="The stored manifest")
def get_manifest(request: Request, services: Wired, run: str, step: str) -> Response:
    """The ETag is the manifest's SHA-256, as in COMMIT. Compressed with zstd if Accept-Encoding contains it."""
    checkpoint = open_checkpoints.find(services, run, step)
    opened = _opened(request)
    commit = opened.commit_bytes(run, checkpoint.step)
    sha256 = stated_sha256(commit)
    compressed = delivery.weights(request.headers.get("accept-encoding", "")).get("zstd", 0.0) > 0
    # Compressed it is another representation, so it has another strong validator.
    headers = {"ETag": f'"{sha256}-zstd"' if compressed else f'"{sha256}"', "Vary": "Accept-Encoding"}
    if delivery.not_modified(request.headers.get("if-none-match"), headers["ETag"]):
        return Response(status_code=304, headers=headers)
    encoded = opened.manifest_bytes(run, checkpoint.step, commit)
    if compressed:
        headers["Content-Encoding"] = "zstd"
        encoded = zstandard.ZstdCompressor(level=delivery.ZSTD_LEVEL).compress(encoded)
    return Response(encoded, media_type="application/json", headers=headers)


@router.get(f"{_CHECKPOINT}/tensors", dependencies=needs("read"), summary="Tensors and aliases, sorted by group and name")
def list_tensors(
    held: Held,
    group: Annotated[str | None, Query(description="only this group")] = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> bodies.Page[bodies.Tensor]:
    return open_checkpoints.page_of_tensors(held, group, cursor, limit)


@router.get(
    f"{_CHECKPOINT}/files",
    dependencies=needs("read"),
    summary="Files, sorted by name, with their lengths on storage",
)
def list_files(
    response: Response, services: Wired, held: Held, cursor: Cursor = None, limit: Limit = 100, urls: Urls = False
) -> bodies.Page[bodies.File]:
    """With `urls=true` each file of a bucket has a URL, which reads it without a token until it ends. Bytes that are read
    so are not checked: compare them with the digests of the manifest or of a shard's plan.
    """
    storage = services.control.storage
    page = open_checkpoints.page_of_files(services.control.records, held, cursor, limit)
    if not urls:
        return page
    response.headers["Cache-Control"] = "no-store"
    signed = [one.model_copy(update={"url": storage.presigned(f"{held.directory}/{one.name}", URL_S)}) for one in page.items]
    return page.model_copy(update={"items": signed})


@router.get(
    f"{_CHECKPOINT}/files/{{name}}",
    dependencies=needs("read"),
    response_class=Response,
    responses=_BYTES,
    summary="Download a file or a byte range of it",
)
async def get_file(request: Request, services: Wired, run: str, step: str, name: str) -> Response:
    """Whole extents are read and checked before their bytes are sent.

    Damage that is found before the first byte is a `corrupt-extent` problem; damage found later cuts the
    connection. One range per request; several ranges are ignored. Compressed with zstd if Accept-Encoding prefers
    it; then there is no length.
    """
    whole = "range" not in request.headers
    sending = await asyncio.to_thread(_delivery, _opened(request), services, (run, step, name), whole)
    return await delivery.deliver(sending, request.headers)


@router.head(
    f"{_CHECKPOINT}/files/{{name}}",
    dependencies=needs("read"),
    response_class=Response,
    summary="A file's length and ETag",
)
def head_file(request: Request, services: Wired, run: str, step: str, name: str) -> Response:
    return delivery.deliver_head(_delivery(_opened(request), services, (run, step, name), True), request.headers)


def _delivery(opened: OpenedCheckpoints, services: Services, path: tuple[str, str, str], whole: bool) -> Delivery:
    """How to send a file; with `whole`, raises `CorruptManifest` if it is missing or has another length."""
    run, step, name = path
    number = open_checkpoints.find(services, run, step).step
    if name in (naming.COMMIT, naming.MANIFEST):
        return _unlisted(opened, run, number, name)
    held = opened.open(run, number)
    entry = held.manifest.file(name)
    if entry is None:
        raise NoSuchResource(f"checkpoint {run}@{number} has no file {name!r}", hint="GET …/files lists the files")
    if whole:
        verification.check_size(held.manifest, name, services.control.records.size(f"{held.directory}/{name}"))
    etag = f'"{held.sha256[:32]}-{entry.digest}"'
    if services.root.bucket is None:
        fetch = delivery.fetch_posix(services.root.directory / held.directory)
    else:
        fetch = delivery.fetch_stored(services.control.records, held.directory)
    return Delivery(_media_type(name), etag, entry.bytes, delivery.proven(name, held.pieces[name], fetch))


def _unlisted(opened: OpenedCheckpoints, run: str, step: int, name: str) -> Delivery:
    """COMMIT or the manifest, which no manifest lists: the stored bytes, after a check that both match."""
    commit = opened.commit_bytes(run, step)
    encoded = opened.manifest_bytes(run, step, commit)
    data = commit if name == naming.COMMIT else encoded

    async def fetch(file: str, start: int, length: int) -> bytes:
        return data[start : start + length]

    (pieces,) = verification.grouped([Piece(name, 0, len(data), digest(data))])
    etag = f'"{hashlib.sha256(data).hexdigest()}"'
    return Delivery("application/json", etag, len(data), delivery.proven(name, pieces, fetch))


def _media_type(name: str) -> str:
    return _MEDIA_TYPES.get(PurePosixPath(name).suffix, "application/octet-stream")
