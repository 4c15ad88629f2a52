"""Checkpoints for tests of control: small, sound, and made without any code of control but its schema."""

from __future__ import annotations

from sqlalchemy import update

from holdfast_formats import naming
from holdfast_formats.digest import digest
from holdfast_formats.disk import manifests
from holdfast_formats.disk.manifests import FileEntry, Manifest
from holdfast_formats.rest import bodies
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.database.schema import CheckpointRow
from holdfast_service.storage import Tier


def a_manifest(run: str, step: int, attempt: int = 1, groups: tuple[str, ...] = ("model",)) -> Manifest:
    """A manifest of one small file and some groups without tensors."""
    return Manifest(
        format=manifests.FORMAT,
        run=run,
        step=step,
        attempt=attempt,
        created=f"2030-01-01T00:00:{step % 60:02d}.000Z",
        world=2,
        mesh={},
        metrics={"loss": 2.5},
        files=(FileEntry(naming.STATE, 2, 0, digest(b"{}")),),
        tensors={group: {} for group in groups},
        aliases={},
    )


def put_checkpoint(tier: Tier, made: Manifest) -> None:
    """Write a checkpoint where a commit would have published it."""
    directory = naming.checkpoint_path(made.run, made.step)
    encoded = manifests.encode(made)
    tier.put(f"{directory}/{naming.STATE}", b"{}")
    tier.put(f"{directory}/{naming.MANIFEST}", encoded)
    tier.put(f"{directory}/{naming.COMMIT}", manifests.encode_commit(made, encoded))


def a_row(run: str, step: int, verified: bool = False, groups: tuple[str, ...] = ("model",)) -> bodies.CheckpointInfo:
    """What the catalog lists of `a_manifest`."""
    made = a_manifest(run, step, groups=groups)
    return bodies.CheckpointInfo(
        run=run,
        step=step,
        attempt=1,
        created=made.created,
        world=2,
        groups=list(groups),
        tensors=0,
        files=1,
        bytes=2,
        metrics={"loss": 2.5},
        verified=verified,
        small_bytes={},
    )


def mark_verified(catalog: Catalog, run: str, step: int) -> None:
    """The catalog says that a checkpoint was read back and found sound, though nobody did."""
    with catalog.database.write() as session:
        session.execute(
            update(CheckpointRow).where(CheckpointRow.run == run, CheckpointRow.step == step).values(verified=True)
        )
