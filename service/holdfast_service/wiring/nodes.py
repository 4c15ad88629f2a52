"""Finds the other nodes of a daemon: none with SQLite; with PostgreSQL those of `wings/cluster`, which is optional."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

from holdfast_formats.errors import InvalidRequest
from holdfast_service.config import Config, is_shared
from holdfast_service.control.control import Control
from holdfast_service.control.database.database import Database
from holdfast_service.control.nodes import Nodes, OneNode
from holdfast_service.daemon.arena.memory_checkpoints import MemoryCheckpoints
from holdfast_service.daemon.saving.other_nodes import NoOtherNodes, OtherNodes

if TYPE_CHECKING:
    from holdfast_service.storage.objects.put_intents import PutIntents


class NodesOfRoot(Protocol):
    """The nodes that serve a root, for control; and what the data plane of this one has of them, made later."""

    @property
    def nodes(self) -> Nodes: ...

    def data_plane(self, control: Control, holds: MemoryCheckpoints, stack: ExitStack) -> OtherNodes: ...


class LoneRoot:
    """A root that one daemon serves."""

    nodes: Nodes = OneNode()

    def data_plane(self, control: Control, holds: MemoryCheckpoints, stack: ExitStack) -> OtherNodes:
        return NoOtherNodes()


def put_intents(config: Config, stack: ExitStack) -> PutIntents:
    """What keeps writers of a bucket apart that does not do that itself. Contacts the catalog; `CatalogUnavailable`."""
    from holdfast_service.wings.cluster.catalog_put_intents import CatalogPutIntents

    database = Database.open(config.catalog_url)
    stack.callback(database.close)
    return CatalogPutIntents(database)


def nodes_of(config: Config, database: Database) -> NodesOfRoot:
    """The nodes of this catalog. `InvalidRequest` where it can be shared, and this installation has no `wings/cluster`."""
    if not is_shared(config.catalog_url):
        return LoneRoot()
    try:
        from holdfast_service.wings.cluster.start import SharedRoot
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            f"--catalog: PostgreSQL serves several nodes, and this installation lacks what they need: {error.name}",
            hint="install the whole package, or leave --catalog out: SQLite serves one machine",
        ) from error
    return SharedRoot(database, config.node, config.exchange)
