"""Finds nodes that may hold slots of a save: by their heartbeats, and by their parts in its rounds."""

from __future__ import annotations

from sqlalchemy import Text, cast, exists, func, literal, or_, select, type_coerce
from sqlalchemy.dialects.postgresql import JSONB

from holdfast_service.control.database.cluster_schema import JointRoundRow, NodeRow, PartRow
from holdfast_service.wings.cluster.membership import Membership, now

HOLDS = "holds"  # key of a node's row: the saves of which it holds slots, by `held_name`


def held_name(run: str, step: int, attempt: int) -> str:
    return f"{run}@{step}~{attempt}"


def holders(membership: Membership, run: str, step: int, attempt: int) -> list[tuple[str, str]]:
    """The names of the nodes and the addresses of their exchange; one statement. `CatalogUnavailable`.

    A node's holdings appear with its next heartbeat, and a round's rows are deleted an hour after it. So both are queried,
    and the caller asks the nodes themselves.
    """
    about = cast(type_coerce(NodeRow.about, Text), JSONB)
    says = func.jsonb_exists(about.op("->")(HOLDS), literal(held_name(run, step, attempt)))
    save = (JointRoundRow.run == run, JointRoundRow.step == step, JointRoundRow.attempt == attempt)
    took_part = exists().where(PartRow.node == NodeRow.name, PartRow.round_id == JointRoundRow.id, *save)
    others = (NodeRow.until > now(), NodeRow.name != membership.me.name)
    wanted = select(NodeRow.name, about.op("->>")("exchange")).where(*others, or_(says, took_part))
    with membership.database.plain() as connection:
        return [(name, url) for name, url in connection.execute(wanted.order_by(NodeRow.name)) if url]
