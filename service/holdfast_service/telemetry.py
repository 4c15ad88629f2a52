"""Every metric the service exposes, declared in one table, and how it logs."""

from __future__ import annotations

import logging
import sys
from typing import Literal, NamedTuple

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class Metric(NamedTuple):
    """A Prometheus metric: what kind it is, what it says, and by which labels it is split."""

    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()


METRICS: dict[str, Metric] = {
    "holdfast_info": Metric("gauge", "1, labelled with node and version", ("node", "version")),
    "holdfast_rounds": Metric("counter", "Rounds that ended, by how", ("state",)),
    "holdfast_rounds_failed": Metric(
        "counter", "Rounds that ended without a checkpoint, by the code of the error", ("code",)
    ),
    "holdfast_checkpoints_removed": Metric("counter", "Checkpoints removed since the start, by why", ("why",)),
    "holdfast_rounds_open": Metric("gauge", "Rounds that are under way"),
    "holdfast_arena_bytes": Metric("gauge", "Shared memory held for staging"),
    "holdfast_ranks": Metric("gauge", "Ranks connected to this daemon"),
    "holdfast_restore_read_bytes": Metric(
        "counter",
        "Bytes read for restores by ranks of one machine: by the node for several, or by a rank for itself",
        ("by",),
    ),
    "holdfast_storage_free_bytes": Metric("gauge", "Bytes that can still be written"),
}


def start_logging(level: str) -> None:
    """Log to stderr from `level` on; `ValueError` for a level that does not exist. Libraries speak up only to warn."""
    logging.basicConfig(level=level.upper(), format=LOG_FORMAT, stream=sys.stderr)
    for library in ("alembic", "sqlalchemy", "httpx", "uvicorn"):
        logging.getLogger(library).setLevel(logging.WARNING)
