"""Damage of each kind, in the tier and in the root: it is named, and mended from the other side. Each kind has a step."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from botocore.exceptions import ClientError

from holdfast_files.objects import commit_objects
from holdfast_files.objects.commit_objects import COMMIT_OBJECT_BYTES_MAX
from holdfast_formats import naming
from holdfast_formats.errors import CorruptManifest
from tests.daemon.bucket.test_bucket_root import RUN, save, settings
from tests.daemon.bucket.test_tier import state_in, tiered
from tests.daemons import wait_until
from tests.kit import commands
from tests.kit.objects import TestBucket, bucket, bucket_server, moto, radosgw, seaweedfs

__all__ = ["bucket", "bucket_server", "moto", "radosgw", "seaweedfs", "settings"]

WEIGHTS = "model.safetensors"
STRANGER = b'{"kind": "a stranger\'s"}'
COMMIT_KEY = f"{naming.COMMITS}/"
SPARSE_BYTES = 5 * 2**30


class Copy(NamedTuple):
    """The objects of one step in the tier, and those of another step."""

    bucket: TestBucket
    keys: Mapping[str, str]  # by file; that of the commit object by its folder
    other: Mapping[str, str]

    def change(self, file: str, act: Callable[[bytes], bytes]) -> None:
        self.bucket.put(self.keys[file], act(self.bucket.read(self.keys[file])))

    def take_from_other(self, file: str) -> None:
        self.bucket.put(self.keys[file], self.bucket.read(self.other[file]))


def objects_of(bucket: TestBucket, step: int) -> dict[str, str]:
    """The key of each object of a step."""
    data = [key for key in bucket.sizes(f"{RUN}/{naming.DATA}/") if f"/{naming.step_directory(step)}." in key]
    return {**{key.rpartition("/")[2]: key for key in data}, COMMIT_KEY: naming.commit_object_path(RUN, step)}


def flipped(data: bytes) -> bytes:
    return bytes([*data[:-1], data[-1] ^ 1])


def lose_all(copy: Copy) -> None:
    for name, key in copy.keys.items():
        if name != COMMIT_KEY:
            copy.bucket.delete(key)


def take_pair(copy: Copy) -> None:
    for name in (naming.MANIFEST, naming.COMMIT):
        copy.take_from_other(name)


IN_THE_TIER: dict[str, tuple[Callable[[Copy], object], str]] = {
    "cut": (lambda copy: copy.change(WEIGHTS, lambda data: data[:-1]), WEIGHTS),
    "other bytes": (lambda copy: copy.change(WEIGHTS, lambda data: bytes(len(data))), WEIGHTS),
    "a stranger's commit object": (lambda copy: copy.change(COMMIT_KEY, lambda data: STRANGER), COMMIT_KEY),
    "no files": (lose_all, naming.COMMIT),
    "a manifest of another step": (lambda copy: copy.take_from_other(naming.MANIFEST), naming.MANIFEST),
    "a flipped bit": (lambda copy: copy.change(WEIGHTS, flipped), WEIGHTS),
    "no weights": (lambda copy: copy.bucket.delete(copy.keys[WEIGHTS]), WEIGHTS),
    "no COMMIT": (lambda copy: copy.bucket.delete(copy.keys[naming.COMMIT]), naming.COMMIT),
    "an empty manifest": (lambda copy: copy.change(naming.MANIFEST, lambda data: b""), naming.MANIFEST),
    "manifest and COMMIT of another step": (take_pair, naming.MANIFEST),
    "a commit object of another step": (lambda copy: copy.take_from_other(COMMIT_KEY), COMMIT_KEY),
    "an empty commit object": (lambda copy: copy.change(COMMIT_KEY, lambda data: b""), COMMIT_KEY),
    "a long commit object": (
        lambda copy: copy.change(COMMIT_KEY, lambda data: data + b" " * COMMIT_OBJECT_BYTES_MAX),
        COMMIT_KEY,
    ),
    "no commit object": (lambda copy: copy.bucket.delete(copy.keys[COMMIT_KEY]), "are gone"),
}
FEW = 5  # of each side in `make test`


def unread(root: Path) -> None:
    """The copies were read back too long ago, as the catalog has it."""
    with closing(sqlite3.connect(root / naming.CATALOG)) as catalog, catalog:
        catalog.execute("UPDATE replicas SET checked = NULL")


def said(url: str, step: int) -> str:
    """What the events say of a step, as one text."""
    found = httpx.get(f"{url}/v1/events?limit=1000").json()["items"]
    kinds = ("replica-failed", "checkpoint-damaged", "copies-gone", "checkpoint-missing", "checkpoint-repaired")
    texts = [one["text"] for one in found if one["kind"] in kinds and one["step"] in (step, None)]
    return "\n".join(texts)


@pytest.mark.parametrize("kinds", [list(IN_THE_TIER)[:FEW], pytest.param(list(IN_THE_TIER), marks=pytest.mark.objects)])
def test_damage_in_the_tier(kinds: list[str], bucket: TestBucket, tmp_path: Path) -> None:
    """An event names each, and the copy is repaired from the root, or made again; those that are whole stay as they are."""
    root, steps = tmp_path / "root", dict(enumerate(kinds, 1))
    spare = len(kinds) + 1
    with tiered(root, bucket.url) as (daemon, api):
        save(daemon, *steps, spare)
        wait_until(lambda: {state_in(api, step) for step in (*steps, spare)} == {"present"})
    whole = {key: bucket.read(key) for key in objects_of(bucket, spare).values()}
    for step, kind in steps.items():
        IN_THE_TIER[kind][0](Copy(bucket, objects_of(bucket, step), objects_of(bucket, spare)))
    unread(root)
    with tiered(root, bucket.url) as (daemon, api):
        wait_until(lambda: all(mended(bucket, root, step) for step in steps))
        wait_until(lambda: {state_in(api, step) for step in steps} == {"present"})
        for step, kind in steps.items():
            assert IN_THE_TIER[kind][1] in said(daemon.url, step), kind
    assert {key: bucket.read(key) for key in whole} == whole


def mended(bucket: TestBucket, root: Path, step: int) -> bool:
    """Whether the copy of a step has the bytes of its checkpoint, where its commit object says that they are."""
    which = naming.CheckpointId(RUN, step)
    if (key := naming.commit_object_path(*which)) not in bucket.sizes():
        return False
    try:
        prefix = f"{RUN}/{naming.DATA}/{commit_objects.decode(bucket.read(key), *which).checkpoint.data}/"
    except CorruptManifest:
        return False
    here = {path.name: path.read_bytes() for path in (root / naming.checkpoint_path(*which)).iterdir()}
    stored = {key.removeprefix(prefix): key for key in bucket.sizes(prefix)}
    try:
        return stored.keys() == here.keys() and all(bucket.read(stored[name]) == data for name, data in here.items())
    except ClientError:  # the copy is being replaced, and its objects go one after the other
        return False


def replace(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def make_sparse(path: Path) -> None:
    os.truncate(path, SPARSE_BYTES)


IN_THE_ROOT: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "cut": (lambda here, other: os.truncate(here / WEIGHTS, (here / WEIGHTS).stat().st_size - 1), WEIGHTS),
    "other bytes": (lambda here, other: replace(here / WEIGHTS, bytes((here / WEIGHTS).stat().st_size)), WEIGHTS),
    "a manifest of another step": (
        lambda here, other: replace(here / naming.MANIFEST, (other / naming.MANIFEST).read_bytes()),
        naming.MANIFEST,
    ),
    "a COMMIT of 5 GiB": (lambda here, other: make_sparse(here / naming.COMMIT), naming.COMMIT),
    "nothing": (lambda here, other: shutil.rmtree(here), "was gone"),
    "a flipped bit": (lambda here, other: replace(here / WEIGHTS, flipped((here / WEIGHTS).read_bytes())), WEIGHTS),
    "no weights": (lambda here, other: (here / WEIGHTS).unlink(), WEIGHTS),
    "no COMMIT": (lambda here, other: (here / naming.COMMIT).unlink(), naming.COMMIT),
    "a stranger's COMMIT": (lambda here, other: replace(here / naming.COMMIT, STRANGER), naming.COMMIT),
    "an empty COMMIT": (lambda here, other: replace(here / naming.COMMIT, b""), naming.COMMIT),
    "a manifest of 5 GiB": (lambda here, other: make_sparse(here / naming.MANIFEST), naming.MANIFEST),
    "an empty manifest": (lambda here, other: replace(here / naming.MANIFEST, b""), naming.MANIFEST),
}


@pytest.mark.parametrize("kinds", [list(IN_THE_ROOT)[:FEW], pytest.param(list(IN_THE_ROOT), marks=pytest.mark.objects)])
def test_damage_in_the_root(kinds: list[str], bucket: TestBucket, tmp_path: Path) -> None:
    """An event names each, and `holdfast repair` mends it from the tier."""
    root, steps = tmp_path / "root", dict(enumerate(kinds, 1))
    spare = len(kinds) + 1
    with tiered(root, bucket.url) as (daemon, api):
        save(daemon, *steps, spare)
        wait_until(lambda: {state_in(api, step) for step in (*steps, spare)} == {"present"})
    for step, kind in steps.items():
        IN_THE_ROOT[kind][0](*(root / naming.checkpoint_path(RUN, at) for at in (step, spare)))
    with tiered(root, bucket.url) as (daemon, api):
        for step, kind in steps.items():
            done = commands.call("repair", f"{RUN}@{step}", "--url", daemon.url)
            assert done.exit_code == 0, (kind, done.stderr)
            wait_until(lambda step=step: api.checkpoint(RUN, step).verified)  # type: ignore[misc]
            assert mended(bucket, root, step), kind
            assert IN_THE_ROOT[kind][1] in said(daemon.url, step), kind
