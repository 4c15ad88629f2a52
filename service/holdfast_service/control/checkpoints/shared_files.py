"""Bytes that several checkpoints of a run have in common, because a later save took a file from an earlier one.

They count once, for the oldest checkpoint that has them: a run occupies the sum of `bytes` less that of `shared_bytes`. The
storage is asked which names are of one file, so this is right whoever made or removed them.
"""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import select, update

from holdfast_formats import naming
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import CheckpointRow
from holdfast_service.storage import Store


def shared_bytes(store: Store, run: str, steps: Collection[int]) -> dict[int, int]:
    """For each of these checkpoints, the bytes of its files that an older one of them has too."""
    known, shared = set[str](), dict[int, int]()
    for step in sorted(steps):
        files = store.identities(naming.checkpoint_path(run, step)).values()
        shared[step] = sum(file.bytes for file in files if file.id in known)
        known |= {file.id for file in files}
    return shared


def sharing(store: Store, run: str, step: int, names: Collection[str] | None) -> list[int]:
    """The other checkpoints that have one of these files of a checkpoint, or one of all."""
    files = store.identities(naming.checkpoint_path(run, step))
    known = {file.id for name, file in files.items() if file.names > 1 and (names is None or name in names)}
    others = [other for other in store.steps(run) if other != step] if known else []

    def has(other: int) -> bool:
        return not known.isdisjoint(file.id for file in store.identities(naming.checkpoint_path(run, other)).values())

    return [other for other in others if has(other)]


def look(store: Store, database: Database, run: str, anew: bool = False) -> None:
    """Update what the catalog says of a run. Unless `anew`, a run of which it says nothing is left alone: none of its files
    were taken from others.
    """
    row = CheckpointRow
    with database.read() as session:
        listed = {step: size for step, size in session.execute(select(row.step, row.shared_bytes).where(row.run == run))}
    if not any(listed.values()) and not (anew and len(listed) > 1):
        return
    found = shared_bytes(store, run, listed)
    changed = {step: size for step, size in found.items() if size != listed[step]}
    if changed:
        with database.write(hasty=True) as session:
            for step, size in changed.items():
                session.execute(update(row).where(row.run == run, row.step == step).values(shared_bytes=size))
