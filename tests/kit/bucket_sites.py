"""Daemons of several nodes on one bucket, with one PostgreSQL: each with a directory of its own for what it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast_formats import naming
from tests.daemons import RunningDaemon
from tests.databases import Postgres
from tests.kit.objects import TestBucket


class BucketNode(RunningDaemon):
    """The daemon of one node."""

    def __init__(self, directory: Path, name: str, root: str, catalog: str, *flags: str) -> None:
        self.name, state = name, directory / name
        socket = directory / f"{name}.sock"
        own = ("--node", name, "--root", root, "--state", str(state), "--socket", str(socket))
        super().__init__(state, *own, "--catalog", catalog, *flags, listen="127.0.0.1:0")
        self.socket = socket


class BucketSite:
    """A root in a bucket; `url` is the catalog's."""

    def __init__(self, bucket: TestBucket, directory: Path, postgres: Postgres, url: str) -> None:
        self.bucket, self.directory, self.postgres, self.url = bucket, directory, postgres, url
        self.daemons: list[BucketNode] = []

    def start(self, name: str, *flags: str, catalog: str = "") -> BucketNode:
        made = BucketNode(self.directory, name, self.bucket.url, catalog or self.url, *flags)
        self.daemons.append(made)
        return made

    def steps(self, run: str) -> list[int]:
        """The steps with a commit object, ascending."""
        top = f"{run}/{naming.COMMITS}/"
        found = [naming.parse_step_directory(key.removeprefix(top)) for key in self.bucket.sizes(top)]
        return sorted(step for step in found if step is not None)


@contextmanager
def bucket_site(bucket: TestBucket, directory: Path, postgres: Postgres) -> Iterator[BucketSite]:
    """A site whose daemons end with the block."""
    url = postgres.take()
    made = BucketSite(bucket, directory, postgres, url)
    try:
        yield made
    finally:
        for daemon in made.daemons:
            if daemon.process.poll() is None:
                daemon.stop()
        postgres.give_back(url)
