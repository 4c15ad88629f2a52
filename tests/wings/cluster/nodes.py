"""Nodes of a cluster for tests: several in this process, on one real PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import update

from holdfast_service.control.database.cluster_schema import DutyRow, NodeRow
from holdfast_service.control.database.database import Database
from holdfast_service.wings.cluster.cluster import Cluster
from holdfast_service.wings.cluster.membership import later
from tests.databases import Postgres


class Nodes:
    """Makes nodes that share a catalog, and closes them. Nothing beats by itself, and a lease ends when a test says so: it
    is longer than a test takes on a busy machine.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._made: list[Cluster] = []

    def add(self, name: str, lease_s: float = 600.0, beat_s: float = 10.0, joined: bool = True) -> Cluster:
        cluster = Cluster(Database.open(self.url), name, lease_s=lease_s, beat_s=beat_s)
        self._made.append(cluster)
        if joined:
            cluster.membership.join(0.0)
        return cluster

    def lapse(self, cluster: Cluster) -> None:
        """The node has not beaten for as long as its lease is."""
        self.left(cluster, -1)

    def left(self, cluster: Cluster, seconds: float) -> None:
        """The node's lease, and its duties', end in so many seconds."""
        name = cluster.membership.me.name
        with cluster.database.write() as session:
            session.execute(update(NodeRow).where(NodeRow.name == name).values(until=later(seconds)))
            session.execute(update(DutyRow).where(DutyRow.node == name).values(until=later(seconds)))

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
