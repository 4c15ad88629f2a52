"""Nodes of a cluster for tests: several in this process, on one real PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast_service.control.cluster.cluster import Cluster
from holdfast_service.control.database.database import Database
from tests.databases import Postgres

LEASE_S = 0.6


class Nodes:
    """Makes nodes that share a catalog, and closes them. Their leases are short; nothing beats by itself."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._made: list[Cluster] = []

    def add(self, name: str, lease_s: float = 30.0, joined: bool = True) -> Cluster:
        cluster = Cluster(Database.open(self.url), name, lease_s=lease_s, beat_s=lease_s / 3)
        self._made.append(cluster)
        if joined:
            cluster.membership.join(0.0)
        return cluster

    def close(self) -> None:
        for cluster in self._made:
            cluster.close()
            cluster.database.close()


@pytest.fixture
def nodes(postgres: Postgres) -> Iterator[Nodes]:
    """A new catalog on the session's PostgreSQL, without a node."""
    url = postgres.take()
    made = Nodes(url)
    yield made
    made.close()
    postgres.give_back(url)
