"""Opens a root for work that no daemon does: a directory, or a bucket with the directory in which this machine keeps what is
its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from holdfast_service.config import RootPlace
from holdfast_service.storage import RootStorage, lock_root, stored_in, tier_at
from holdfast_service.storage.identity import Whereabouts


@contextmanager
def opened(place: RootPlace, node: str, *, alone: bool = False) -> Iterator[RootStorage]:
    """Under an exclusive lock, and in a bucket with its lease: `RootBusy` while a daemon with its own catalog serves it.
    `alone`: also in a bucket that cannot keep two writers apart.
    """
    with ExitStack() as stack:
        stack.callback(lock_root(place.directory).release)
        if place.bucket is None:
            yield stored_in(tier_at(place.directory))
            return
        from holdfast_service.storage.objects.opening import open_bucket  # which needs the extra s3

        storage = open_bucket(place.bucket, node, place.directory, alone=alone)
        stack.callback(storage.close)
        yield storage


def whereabouts(place: RootPlace) -> Whereabouts:
    return Whereabouts(place.directory, place.label if place.bucket else "")
