"""Lists and removes what lies below a prefix of a bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from holdfast_files.objects.client import Bucket
from holdfast_formats import naming
from holdfast_formats.errors import NoSuchResource

FENCE = ".discarded"  # after the name of a prefix: an object that is there while the files of a round are thrown away


class Objects(NamedTuple):
    """What lies below a prefix: the keys, and the seconds since the last write by the store's own clock (I17)."""

    keys: list[str]
    idle_s: float


def objects_below(bucket: Bucket, directory: str) -> Objects:
    keys, newest, now = list[str](), 0.0, 0.0
    for page in bucket.pages(f"{directory}/"):
        now = max(now, page.now)
        keys += [one.key for one in page.objects]
        newest = max([newest, *(one.modified for one in page.objects)])
    return Objects(keys, max(now - newest, 0.0))


def names_in(bucket: Bucket, directory: str) -> Iterator[str]:
    """The names of what has objects below it."""
    top = f"{directory}/" if directory else ""
    for page in bucket.pages(top, delimiter="/"):
        yield from (prefix.removeprefix(top).rstrip("/") for prefix in page.prefixes)


def has_objects(bucket: Bucket, directory: str) -> bool:
    return any(page.objects for page in bucket.pages(f"{directory}/"))


def exists(bucket: Bucket, key: str) -> bool:
    """Whether there is an object. One request: HEAD needs two, to tell a missing object from a missing bucket."""
    try:
        bucket.read(key, 0, 1)
    except NoSuchResource:
        return False
    return True


def erase(bucket: Bucket, directory: str) -> bool:
    """Remove everything below a prefix; False if there was nothing."""
    keys = objects_below(bucket, directory).keys
    if keys:
        bucket.delete(keys)
    return bool(keys)


def erase_data(bucket: Bucket, directory: str, marks: Sequence[str] | None = None) -> bool:
    """Remove the files of a try to save a step, which no commit object names, and before them the `marks` of their line,
    which are listed unless they are given. False if there was nothing.
    """
    run, _, data = directory.partition(f"/{naming.DATA}/")
    keys = marks_of(bucket, run, data) if marks is None else list(marks)
    keys += objects_below(bucket, directory).keys
    if keys:
        bucket.delete(keys)
    return bool(keys)


def marks_of(bucket: Bucket, run: str, data: str) -> list[str]:
    """The keys of the marks that say on which line a checkpoint with these files is."""
    return [one.key for page in bucket.pages(naming.line_marks(run, data)) for one in page.objects]


def fence_of(directory: str) -> str:
    return f"{directory}{FENCE}"
