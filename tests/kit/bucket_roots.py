"""A root in a bucket, made of one in a directory: the objects that a daemon on the bucket would have left."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from holdfast_files.objects.commit_objects import Published, commit_object, encode
from holdfast_formats import lineage, naming
from holdfast_formats.disk import manifests
from holdfast_formats.errors import Damaged
from holdfast_formats.naming import Place
from holdfast_formats.rest import bodies
from tests.kit.memory_bucket import MemoryBucket
from tests.kit.objects import TestBucket

ROUND = 7
NO_DAEMON = json.dumps({"id": "of-tests", "inode": 0}).encode()


def upload(root: Path, bucket: TestBucket, prefix: str = "") -> str:
    """Put a root directory's runs into a bucket; the root's address. A file of a run that has no commit is left out."""
    top = f"{prefix}/" if prefix else ""
    mark = root / naming.ROOT_FILE
    bucket.put(f"{top}{naming.ROOT_FILE}", mark.read_bytes() if mark.exists() else NO_DAEMON)
    for directory in sorted(root.glob(f"*/{naming.CHECKPOINTS}/*")):
        upload_checkpoint(directory, bucket, prefix)
    return f"{bucket.url}/{prefix}" if prefix else bucket.url


def upload_checkpoint(directory: Path, bucket: TestBucket | MemoryBucket, prefix: str = "", round_id: int = ROUND) -> str:
    """Put a checkpoint's files and then its commit object into a bucket; the key of the commit object."""
    top, run = f"{prefix}/" if prefix else "", directory.parents[1].name
    step = naming.parse_step_directory(directory.name)
    assert step is not None
    place = Place(run, step, 1, round_id)
    for file in sorted(directory.iterdir()):
        bucket.put(f"{top}{naming.data_path(place)}/{file.name}", file.read_bytes())
    commit, summary = (directory / naming.COMMIT).read_bytes(), None
    with suppress(Damaged, OSError):
        manifest = manifests.decode((directory / naming.MANIFEST).read_bytes(), commit)
        summary = bodies.summary(manifest)
        bucket.put(f"{top}{naming.line_mark(run, naming.data_directory(place), lineage.line(manifest.rewinds))}", b"")
    content = commit_object(
        Published(naming.data_directory(place), manifests.stated_sha256(commit), f"r{round_id}", summary)
    )
    key = f"{top}{naming.commit_object_path(run, step)}"
    bucket.put(key, encode(content, run, step))
    return key
