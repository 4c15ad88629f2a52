"""Routes: the daemons that share this catalog."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Path

from holdfast_formats.errors import CatalogUnavailable
from holdfast_formats.rest import bodies
from holdfast_formats.timestamps import write
from holdfast_service.api import problems
from holdfast_service.api.access.authorization import needs
from holdfast_service.api.services import Services, Viewer, Wired
from holdfast_service.config import NODE_NAME
from holdfast_service.control.access.tokens import Principal
from holdfast_service.control.nodes import UPKEEP, ClusterNode

router = APIRouter(prefix="/v1", tags=["operations"], responses=problems.RESPONSES)


@router.get("/nodes", dependencies=needs("read"), summary="Daemons that write to this catalog")
def list_nodes(services: Wired, viewer: Viewer) -> bodies.Page[bodies.Node]:
    """Process, root, machine and addresses are shown only to tokens for all runs; the socket also to tokens that may
    save.
    """
    return bodies.Page(items=listed_nodes(services, viewer))


@router.delete(
    "/nodes/{name}",
    dependencies=needs("admin", "all", act="node-forgotten"),
    status_code=204,
    summary="Forget a node that is gone",
)
def forget_node(services: Wired, name: Annotated[str, Path(pattern=NODE_NAME)]) -> None:
    """It is no longer listed, and no alert tells of it. 409 if it is live; it may join again at any time."""
    services.control.nodes.forget(name)
    services.control.events.add("node-forgotten", f"the node {name} is no longer listed")


@router.post(
    "/nodes/secret",
    dependencies=needs("admin", "all", act="secret-rotated"),
    status_code=204,
    summary="Make a new secret for the nodes of this catalog",
)
def rotate_secret(services: Wired) -> None:
    """By this secret nodes know each other. The one before is accepted until the next rotation."""
    services.control.nodes.rotate_secret()
    services.control.events.add("secret-rotated", "the nodes of this catalog have a new shared secret")


def listed_nodes(services: Services, viewer: Principal) -> list[bodies.Node]:
    """The nodes, with the details that this caller may see."""
    ranks = {run: len(services.saver.connected.of(run)) for run in services.saver.connected.runs if viewer.sees(run)}
    here = _Record(services.node(), services.arena.holders, ranks)
    try:
        members = services.control.nodes.members()
    except CatalogUnavailable:  # this node reports that itself
        members = ()
    nodes = [here]
    if members:
        node_ranks = services.control.nodes.by_node()
        nodes = [here if m.name == here.node.name else _Record.of(m, node_ranks.get(m.name, {})) for m in members]
        nodes = [one._replace(node=_as_member(one.node, m)) for one, m in zip(nodes, members, strict=True)]
    return [one.seen_by(viewer) for one in nodes]


class _Record(NamedTuple):
    """A node's own description: the bytes of its arena by run, and its connected ranks of visible runs."""

    node: bodies.Node
    held: Mapping[str, int]
    ranks: Mapping[str, int]

    @classmethod
    def of(cls, member: ClusterNode, ranks: Mapping[str, int]) -> _Record:
        joined: dict[str, Any] = {"name": member.name, "version": "", "socket": None, "started": write(member.since)}
        about = joined | {"arena_bytes": 0, "ranks": 0}  # a node describes itself some moments after it has joined
        about |= {name: member.about[name] for name in bodies.Node.model_fields if name in member.about}
        return cls(bodies.Node(**about), member.about.get("held", {}), ranks if member.live else {})

    def seen_by(self, viewer: Principal) -> bodies.Node:
        node = self.node.model_copy(update={"runs": dict(self.ranks)})
        if viewer.sees_all:
            return node
        changes: dict[str, Any] = {
            **dict.fromkeys(("pid", "root", "host", "url", "exchange")),
            "replicas": {},
            "lags": [],
            "bucket": None,
            "arena_bytes": sum(size for run, size in self.held.items() if viewer.sees(run)),
            "memory": [one for one in node.memory if viewer.sees(one.run)],
            "averages": [one for one in node.averages if viewer.sees(one.run)],
            "ranks": sum(self.ranks.values()),
            "duties": [duty for duty in node.duties if duty == UPKEEP],  # others are named by runs and replicas
            "catalog": "the catalog does not answer; saves continue" if node.catalog else None,
            "sealed": 0,  # by it, and by what waits, others' saves could be counted
            "catalog_waiting": 0,
        }
        if not viewer.may("write"):
            changes |= {"socket": None, "socket_id": None}
        return node.model_copy(update=changes)


def _as_member(node: bodies.Node, member: ClusterNode) -> bodies.Node:
    gone: dict[str, Any] = {"ranks": 0, "arena_bytes": 0, "memory": [], "averages": [], "sealed": 0, "busy": False}
    gone |= {"catalog": None, "replicas": {}, "lags": []}
    return node.model_copy(
        update={
            **({} if member.live else gone),
            "live": member.live,
            "state": member.state,
            "since": write(member.since),
            "heard_s": round(member.heard_s, 1),
            "lease_s": round(member.lease_s, 1),
            "duties": list(member.duties),
        }
    )
