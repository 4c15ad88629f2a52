"""Opens a root in a bucket: connects, finds out what the bucket honours, and takes the lease if one daemon serves it, or if
daemons of several nodes are about to share it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

from holdfast_files.objects import client
from holdfast_files.objects.address import BucketAddress
from holdfast_files.objects.client import Bucket
from holdfast_files.objects.object_files import ObjectFiles
from holdfast_files.objects.probe import Honours, probe
from holdfast_files.objects.storing import AS_USUAL, Storing
from holdfast_files.objects.traffic import Traffic
from holdfast_formats.errors import InvalidRequest
from holdfast_service.observe.bucket_traffic import checkpoint_of
from holdfast_service.storage.identity import Whereabouts, catalog_of
from holdfast_service.storage.root_storage import Arbiter, Looks, RootStorage

from .conditional_puts import ConditionalPuts
from .lease import BucketLease
from .object_records import ObjectRecords
from .object_store import ObjectStore
from .put_intents import PutIntents
from .uploads import Uploads

log = logging.getLogger(__name__)

LOOK_S = 120.0  # for each request of a look: with the lease, an idle daemon asks once a minute
LOOKS = Looks(lambda runs: LOOK_S * (1 + 3 * runs), at_files=False, late=False)


class SharedCatalog(NamedTuple):
    """The catalog by which daemons of several nodes share a root: its address, and what keeps writers apart where the bucket
    does not, which is opened only then; `CatalogUnavailable`.
    """

    address: str
    intents: Callable[[], PutIntents]


def open_bucket(  # noqa: PLR0913 - each is one thing
    place: BucketAddress,
    node: str,
    state: Path,
    *,
    alone: bool = False,
    shared: SharedCatalog | None = None,
    storing: Storing = AS_USUAL,
    traffic: Traffic | None = None,
) -> RootStorage:
    """A root in a bucket. `alone`: nothing else writes to a bucket that cannot keep two writers apart. `shared`: daemons of
    several nodes serve it; then call `RootStorage.shared` once the root is marked. `storing` is how new objects are stored.
    `traffic` counts requests, by `checkpoint_of`; it is a new one if none is given.

    Raises `InvalidRequest` for such a bucket without either, `RootBusy` where another daemon has the lease.
    """
    with ExitStack() as stack:
        traffic = traffic or Traffic(checkpoint_of(place))
        bucket = client.opened(place.label, traffic=traffic).using(storing=storing.headers(files=False))
        stack.callback(bucket.close)
        honours = probe(bucket)
        traffic.forget_failures()  # which the probe had on purpose
        bucket = bucket.using(checksum=honours.checksum)
        arbiter = _arbiter(bucket.label, honours, alone, shared is not None)
        intents = shared.intents() if shared is not None and arbiter == "catalog" else None
        puts = ConditionalPuts(bucket, honours, (lambda run: nullcontext()) if arbiter == "none" else None, intents)
        files = ObjectFiles(bucket)
        records = ObjectRecords(bucket, puts, files)
        lease = _lease(bucket, records, node, state, shared) if honours.arbitrates else None
        if lease is not None:
            stack.callback(lease.close)
        uploads = Uploads(bucket.using(storing=storing.headers(files=True)))
        stack.callback(uploads.close)
        store = ObjectStore(uploads, puts, files, lease.confirm if lease else None)
        opened = stack.pop_all()
    presign = partial(_presigned, bucket, files)
    return RootStorage(records, store, None, LOOKS, opened.close, lease, arbiter, presign, traffic)


def _presigned(bucket: Bucket, files: ObjectFiles, path: str, seconds: int) -> str:
    return bucket.presign(files.key(path), seconds)


def _lease(
    bucket: Bucket, records: ObjectRecords, node: str, state: Path, shared: SharedCatalog | None
) -> BucketLease | None:
    if shared is None:
        return BucketLease.take(bucket, node, state)
    where = Whereabouts(state, bucket.label)
    return BucketLease.take_until_shared(
        bucket, node, state, shared.address, lambda: catalog_of(records, where) == shared.address
    )


def _arbiter(label: str, honours: Honours, alone: bool, shared: bool) -> Arbiter:
    """What lets one of two writers through."""
    if honours.arbitrates:
        return "bucket"
    if shared:
        log.warning("%s cannot keep two writers apart (%s): the catalog does", label, honours.lacking)
        return "catalog"
    if alone:
        log.warning("%s cannot keep two writers apart (%s): nothing else may write there", label, honours.lacking)
        return "none"
    raise InvalidRequest(
        f"{label} cannot keep two writers apart: {honours.lacking}",
        hint="use a server that honours conditional writes, share the bucket by --catalog postgresql://…, or pass "
        "--alone if no other daemon ever writes there",
    )
