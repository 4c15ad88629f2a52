"""Commit: the only publisher (I2). Published checkpoints are complete and durable (I1), in the order of I3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from holdfast_formats import metric_values, naming
from holdfast_formats.digest import digest
from holdfast_formats.disk import index, manifests
from holdfast_formats.disk.manifests import Extent, FileEntry, Manifest, TensorEntry
from holdfast_formats.errors import AlreadyCommitted, Damaged, NoSuchResource, RoundAborted, StateMismatch, StorageFailed
from holdfast_formats.lineage import Lineage
from holdfast_formats.naming import Place
from holdfast_formats.staging.joint import JointlyStaged
from holdfast_formats.staging.plan import PlannedFile, Receipt, WritePlan, decode_receipt
from holdfast_service.storage import CommitContents, Store, Tier


class About(NamedTuple):
    """The parent of the checkpoint, and whether it replaces another one of its step."""

    lineage: Lineage = Lineage()
    over: bool = False


ABOUT = About()


class Vouched(NamedTuple):
    """A checkpoint whose files are staged: its manifest, its encoded form, COMMIT, and the small files to add."""

    made: Manifest
    encoded: bytes
    commit: bytes
    small: Mapping[str, bytes]


def publish(store: Store, plan: WritePlan, created: str, place: Place | None = None, about: About = ABOUT) -> Manifest:
    """Publish the staged files of `plan`, by default from its attempt's staging directory.

    When this returns, the checkpoint is visible and survives a power cut.

    I3: data and receipts are durable already; then manifest, indexes and state; then COMMIT; then the directory; then the
    rename; then its parents. Raises `StateMismatch` when the receipts do not cover the plan, `AlreadyCommitted` when the
    step exists, `StorageFailed` when a write failed; if that was after the rename, the message says "outcome unknown" (I9).
    """
    place = place or Place(plan.run, plan.step, plan.attempt)
    receipts = [decode_receipt(one) for one in store.receipts(place)]
    small = _small_files(plan)
    manifest = compose(plan, receipts, _listed(small), created, about.lineage)
    _commit(store, place, manifest, small, about.over)
    return manifest


def publish_joint(store: Store, plan: WritePlan, staged: JointlyStaged, about: About = ABOUT) -> Manifest:
    """Publish what several nodes have written; as `publish`, in its order.

    Every node makes the same bytes from the same receipts. If another node has published meanwhile, its checkpoint is
    compared: the same one is a success (I14). `RoundAborted` where files are missing: then the round has ended some other
    way.
    """
    small = _small_files(plan)
    _check_receipts(plan, staged.receipts)
    manifest = _compose_joint(plan, staged, small, about.lineage)
    manifests.validate(manifest)  # a plan's own files are tiled; only this checks that the nodes' shares are
    _commit(store, staged.place, manifest, small, about.over)
    return manifest


def published_already(store: Store, plan: WritePlan, staged: JointlyStaged) -> Manifest | None:
    """The checkpoint of this very round, if another node has published it and was lost before it recorded that.

    It is committed once more, which changes nothing: that node may have been lost before it was durable.
    """
    target = naming.checkpoint_path(plan.run, plan.step)
    if store.files.size(f"{target}/{naming.COMMIT}") is None:
        return None
    try:
        stands = store.files.read(f"{target}/{naming.MANIFEST}")
        published = manifests.decode(stands, store.files.read(f"{target}/{naming.COMMIT}"))
    except (Damaged, NoSuchResource):
        return None
    small = _small_files(plan)
    manifest = _compose_joint(plan, staged, small, Lineage(published.restored, published.turn, published.rewinds))
    if manifests.encode(manifest) != stands:
        return None
    _commit(store, staged.place, manifest, small, over=True)
    return manifest


def vouch(plan: WritePlan, receipt: Receipt, created: str, lineage: Lineage) -> Vouched:
    """The manifest of what one job has staged, to be read back before `publish_copy`; `StateMismatch` as of `compose`."""
    small = _small_files(plan)
    manifest = compose(plan, [receipt], _listed(small), created, lineage)
    encoded = manifests.encode(manifest)
    return Vouched(manifest, encoded, manifests.encode_commit(manifest, encoded), small)


def publish_copy(store: Store, place: Place, encoded: bytes, commit_bytes: bytes, over: bool = False) -> Manifest:
    """Publish a checkpoint whose files are durable and proven at `place`: a replica, an import, or the rest of a thinned
    one, `over` which it is put.

    The order is that of `publish` (I3). Raises `CorruptManifest` or `NotCommitted` before anything is written when the two
    do not belong together, and the errors of `publish`.
    """
    manifest = manifests.decode(encoded, commit_bytes)
    _settle(store, place, CommitContents(_sizes(manifest, {}), {}, encoded, commit_bytes), over)
    return manifest


def publish_export(tier: Tier, staging: str, target: str) -> None:
    """Rename a proven and durable copy outside of any root to its final name; `AlreadyCommitted` when that exists."""
    tier.publish(staging, target)


def _commit(store: Store, place: Place, manifest: Manifest, small: Mapping[str, bytes], over: bool) -> None:
    encoded = manifests.encode(manifest)
    commit_bytes = manifests.encode_commit(manifest, encoded)
    manifests.lend(manifest, commit_bytes)  # to its check
    _settle(store, place, CommitContents(_sizes(manifest, small), small, encoded, commit_bytes), over)


def _settle(store: Store, place: Place, contents: CommitContents, over: bool = False) -> None:
    """Raise the error of a failed commit."""
    done = store.commit(place, contents, over)
    if done.outcome == "taken":
        raise AlreadyCommitted(done.detail, path=naming.checkpoint_path(place.run, place.step))
    if done.outcome == "gone":
        raise RoundAborted(done.detail)
    if done.outcome == "unknown":
        raise StorageFailed(
            f"outcome unknown: {done.detail}",
            hint="a power failure may lose the checkpoint; check the disk, then verify it",
            outcome="unknown",
        )


def _sizes(manifest: Manifest, small: Mapping[str, bytes]) -> dict[str, int]:
    return {entry.name: entry.bytes for entry in manifest.files if entry.name not in small}


def _small_files(plan: WritePlan) -> dict[str, bytes]:
    return {naming.index_file_name(group): encode_index(plan, group) for group in plan.groups} | {naming.STATE: plan.state}


def _listed(small: Mapping[str, bytes]) -> list[FileEntry]:
    return [FileEntry(name, len(data), 0, digest(data)) for name, data in small.items()]


def _compose_joint(plan: WritePlan, staged: JointlyStaged, small: Mapping[str, bytes], lineage: Lineage) -> Manifest:
    planned = Receipt("", plan.run, plan.step, plan.attempt, tuple(_planned_entry(file) for file in plan.files), {})
    return compose(plan, [planned, *staged.receipts], _listed(small), staged.created, lineage)


def _check_receipts(plan: WritePlan, receipts: Sequence[Receipt]) -> None:
    for one in receipts:
        if (one.run, one.step, one.attempt) != (plan.run, plan.step, plan.attempt):
            why = f"the receipt of node {one.node} belongs to {one.run}@{one.step}, attempt {one.attempt}"
            raise StateMismatch(f"{why}: it belongs to another save")


def _planned_entry(file: PlannedFile) -> FileEntry:
    layout = file.layout
    return FileEntry(layout.name, layout.bytes, len(layout.header), digest(layout.header))


def compose(
    plan: WritePlan, receipts: Sequence[Receipt], small: Sequence[FileEntry], created: str, lineage: Lineage = ABOUT.lineage
) -> Manifest:
    """The manifest of a plan from what the nodes made durable; `StateMismatch` when the receipts do not cover it."""
    written = {entry.name: entry for receipt in receipts for entry in receipt.files}
    proven = _extents(receipts)
    tensors: dict[str, dict[str, TensorEntry]] = {group: {} for group in plan.groups}
    for file in plan.files:
        entry = written.get(file.layout.name)
        if entry is None or (entry.bytes, entry.header_bytes) != (file.layout.bytes, len(file.layout.header)):
            raise StateMismatch(f"no node's receipt covers {file.layout.name} of {file.layout.bytes} bytes")
        for tensor in file.tensors:
            spec = tensor.spec
            extents = sorted(proven.get((spec.group, spec.name), ()), key=lambda e: e.offset)
            tensors[spec.group][spec.name] = TensorEntry(
                dtype=spec.dtype,
                shape=spec.shape,
                file=file.layout.name,
                start=tensor.start,
                extents=tuple(extents),
                placement=tensor.placement,
            )
    missing = [asset.blob.name for asset in plan.assets if asset.blob.name not in written]
    if missing:
        raise StateMismatch(f"no node's receipt covers the assets {missing}")
    finite, words = metric_values.split(plan.metrics)
    return Manifest(
        format=manifests.FORMAT,
        run=plan.run,
        step=plan.step,
        attempt=plan.attempt,
        created=created,
        world=plan.world,
        mesh=plan.mesh,
        metrics=finite,
        nonfinite_metrics=words,
        files=(*sorted(written.values(), key=lambda e: e.name), *small),
        tensors=tensors,
        aliases=plan.aliases,
        restored=lineage.restored,
        turn=lineage.turn,
        rewinds=lineage.rewinds,
    )


def _extents(receipts: Sequence[Receipt]) -> dict[tuple[str, str], list[Extent]]:
    """All nodes' extents of each tensor. Most nodes have none of most tensors."""
    found: dict[tuple[str, str], list[Extent]] = {}
    for receipt in receipts:
        for group, names in receipt.extents.items():
            for name, extents in names.items():
                found.setdefault((group, name), []).extend(extents)
    return found


def encode_index(plan: WritePlan, group: str) -> bytes:
    """A group's index file."""
    return index.encode(file.layout for file in plan.files if file.layout.group == group)
