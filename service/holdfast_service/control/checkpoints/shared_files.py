"""Bytes that several checkpoints of a run have in common, because a later save took a file from an earlier one.

They count once, for the oldest checkpoint that has them: a run occupies the sum of `bytes` less that of `shared_bytes`. The
storage is asked which names are of one file, so it does not matter what made or removed them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sqlalchemy import select, update

from holdfast_formats import naming
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import CheckpointRow
from holdfast_service.storage import Store

_BESIDE = frozenset({naming.COMMIT, naming.MANIFEST})  # not among the files that `bytes` counts


def shared_bytes(store: Store, run: str, sizes: Mapping[int, int]) -> dict[int, int]:
    """For each of these checkpoints, whose `bytes` are given, those of its files that an older one of them has too. A file
    that was cut short counts as it was saved: each of its checkpoints states all of it.
    """
    known, shared = set[str](), dict[int, int]()
    for step in sorted(sizes):
        files = store.identities(naming.checkpoint_path(run, step))
        own = {name: file for name, file in files.items() if file.id not in known}
        rest = sizes[step] - sum(file.bytes for name, file in own.items() if name not in _BESIDE)
        shared[step] = max(rest, 0) if len(own) < len(files) else 0
        known |= {file.id for file in files.values()}
    return shared


def sharing(store: Store, run: str, step: int, names: Collection[str] | None) -> list[int]:
    """The other checkpoints that have one of these files of a checkpoint, or one of all."""
    found = by_file(store, run, step)
    return sorted({other for name, others in found.items() if names is None or name in names for other in others})


def by_file(store: Store, run: str, step: int) -> dict[str, list[int]]:
    """For each file that a checkpoint shares, the other checkpoints that have it under the same name."""
    files = store.identities(naming.checkpoint_path(run, step))
    shared = {name: file.id for name, file in files.items() if file.names > 1}
    found: dict[str, list[int]] = {name: [] for name in shared}
    for other in store.steps(run) if shared else ():
        theirs = store.identities(naming.checkpoint_path(run, other)) if other != step else {}
        for name, identity in shared.items():
            if name in theirs and theirs[name].id == identity:
                found[name].append(other)
    return found


def look(store: Store, database: Database, run: str, may_share: bool = False) -> None:
    """Update what the catalog says of a run. A run without shared files is left alone, unless a new checkpoint `may_share`
    some.
    """
    row = CheckpointRow
    with database.read() as session:
        found = session.execute(select(row.step, row.bytes, row.shared_bytes).where(row.run == run)).all()
    if not any(shared for _, _, shared in found) and not (may_share and len(found) > 1):
        return
    now = shared_bytes(store, run, {step: size for step, size, _ in found})
    changed = {step: now[step] for step, _, shared in found if now[step] != shared}
    if changed:
        with database.write(hasty=True) as session:
            for step, size in changed.items():
                session.execute(update(row).where(row.run == run, row.step == step).values(shared_bytes=size))
