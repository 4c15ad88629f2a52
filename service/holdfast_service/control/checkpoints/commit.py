"""Commit: the only publisher (I2). Published checkpoints are complete and durable (I1), in the order of I3."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from holdfast_formats import naming
from holdfast_formats.digest import digest
from holdfast_formats.disk import index, manifest
from holdfast_formats.disk.manifest import Extent, FileEntry, Manifest, TensorEntry
from holdfast_formats.errors import (
    AlreadyCommitted,
    CheckpointError,
    Damaged,
    NoSuchResource,
    RoundAborted,
    StateMismatch,
    StorageFailed,
)
from holdfast_formats.lineage import Lineage
from holdfast_formats.staging.joint import JointlyStaged
from holdfast_formats.staging.plan import PlannedFile, Receipt, WritePlan, decode_receipt
from holdfast_service.storage import Tier


class About(NamedTuple):
    """Where the checkpoint comes from; and whether it is put in the place of another one of its step."""

    lineage: Lineage = Lineage()
    over: bool = False


ABOUT = About()


def publish(tier: Tier, plan: WritePlan, created: str, staging: str = "", about: About = ABOUT) -> Manifest:
    """Publish the staged files of `plan`, from where its attempt stages unless told otherwise.

    When this returns, the checkpoint is visible and survives a power cut.

    I3: data and receipts are durable already; then manifest, indexes and state; then COMMIT; then the directory; then the
    rename; then its parents. Raises `StateMismatch` when the receipts do not cover the plan, `AlreadyCommitted` when the
    step exists, `StorageFailed` when a write failed; if that was after the rename, the message says "outcome unknown" (I9).
    """
    staging = staging or naming.staging_path(plan.run, plan.step, plan.attempt)
    receipts = _read_receipts(tier, staging)
    small = [_put(tier, staging, naming.index_file_name(group), encode_index(plan, group)) for group in plan.groups]
    small.append(_put(tier, staging, naming.STATE, plan.state))
    made = compose(plan, receipts, small, created, about.lineage)
    encoded = manifest.encode(made)
    _make_visible(tier, staging, made, (encoded, manifest.encode_commit(made, encoded)), about.over)
    return made


def publish_joint(tier: Tier, plan: WritePlan, staged: JointlyStaged, about: About = ABOUT) -> Manifest:
    """Publish what several nodes have written; as `publish`, in its order.

    Every node makes the same bytes of the same receipts. So if another node has published meanwhile, what stands there is
    compared, and is this one's success where it is the same (I14). `RoundAborted` where the files are not, or not all, there
    any more: then the round has ended some other way.
    """
    small = _small_files(plan)
    made = _compose_joint(plan, staged, small, about.lineage)
    manifest.validate(made)  # a plan's own files are tiled; that the nodes' shares are, only this says
    encoded = manifest.encode(made)
    commit_bytes = manifest.encode_commit(made, encoded)
    written = [entry for entry in made.files if entry.name not in small]
    target = naming.checkpoint_path(made.run, made.step)
    try:
        _check_there(tier, staged.path, written)
        for name, data in (small | {naming.MANIFEST: encoded, naming.COMMIT: commit_bytes}).items():
            _put_again(tier, f"{staged.path}/{name}", data)
        _check_there(tier, staged.path, written)  # else another node has published it, and the small ones stand there alone
        _give_name(tier, staged.path, made, about.over)
    except (AlreadyCommitted, NoSuchResource, RoundAborted):
        if tier.size(f"{target}/{naming.COMMIT}") is None or tier.read(f"{target}/{naming.COMMIT}") != commit_bytes:
            raise
    return made


def published_already(tier: Tier, plan: WritePlan, staged: JointlyStaged) -> Manifest | None:
    """The checkpoint of this very round, if another node has published it, and was lost before it could say so."""
    target = naming.checkpoint_path(plan.run, plan.step)
    if tier.size(f"{target}/{naming.COMMIT}") is None:
        return None
    try:
        stands = tier.read(f"{target}/{naming.MANIFEST}")
        found = manifest.decode(stands, tier.read(f"{target}/{naming.COMMIT}"))
    except (Damaged, NoSuchResource):
        return None
    lineage = Lineage(found.restored, found.turn, found.rewinds)
    made = _compose_joint(plan, staged, _small_files(plan), lineage)
    return made if manifest.encode(made) == stands else None


def _small_files(plan: WritePlan) -> dict[str, bytes]:
    return {naming.index_file_name(group): encode_index(plan, group) for group in plan.groups} | {naming.STATE: plan.state}


def _compose_joint(plan: WritePlan, staged: JointlyStaged, small: Mapping[str, bytes], lineage: Lineage) -> Manifest:
    planned = Receipt("", plan.run, plan.step, plan.attempt, tuple(_planned_entry(file) for file in plan.files), {})
    listed = [FileEntry(name, len(data), 0, digest(data)) for name, data in small.items()]
    return compose(plan, [planned, *staged.receipts], listed, staged.created, lineage)


def _put_again(tier: Tier, path: str, data: bytes) -> None:
    """A small file that a committer who was lost may have left here, whole or not."""
    if tier.size(path) is None:
        try:
            tier.put(path, data)
            return
        except StorageFailed:
            if tier.size(path) is None:  # else it came at this moment
                raise
    if tier.read(path) != data:
        tier.replace(path, data)


def _planned_entry(file: PlannedFile) -> FileEntry:
    layout = file.layout
    return FileEntry(layout.name, layout.bytes, len(layout.header), digest(layout.header))


def _check_there(tier: Tier, staging: str, files: Sequence[FileEntry]) -> None:
    for entry in files:
        found = tier.size(f"{staging}/{entry.name}")
        if found != entry.bytes:
            stands = "is not there" if found is None else f"has {found} bytes"
            raise RoundAborted(f"{staging}/{entry.name} {stands}, but the nodes have written {entry.bytes}")


def publish_copy(tier: Tier, staging: str, encoded: bytes, commit_bytes: bytes) -> Manifest:
    """Publish a checkpoint whose files stand, durable and proven, in `staging`: a replica, or one brought from elsewhere.

    The order is that of `publish` (I3). Raises `CorruptManifest` or `NotCommitted` before anything is written when the two
    do not belong together, and what `publish` raises.
    """
    made = manifest.decode(encoded, commit_bytes)
    _make_visible(tier, staging, made, (encoded, commit_bytes))
    return made


def publish_export(tier: Tier, staging: str, target: str) -> None:
    """Give a proven and durable copy, outside of any root, its name at one stroke; `AlreadyCommitted` when that is taken."""
    tier.publish(staging, target)


def _make_visible(tier: Tier, staging: str, made: Manifest, vouching: tuple[bytes, bytes], over: bool = False) -> None:
    """From the manifest on, the order of I3."""
    encoded, commit_bytes = vouching
    tier.put(f"{staging}/{naming.MANIFEST}", encoded)
    tier.remove_tree(f"{staging}/{naming.RECEIPTS}")
    tier.put(f"{staging}/{naming.COMMIT}", commit_bytes)
    _give_name(tier, staging, made, over)


def _give_name(tier: Tier, staging: str, made: Manifest, over: bool) -> None:
    """From the directory on, the order of I3."""
    target = naming.checkpoint_path(made.run, made.step)
    tier.sync_directory(staging)
    try:
        if over:
            _replace(tier, staging, target, naming.replaced_path(made.run, made.step))
        else:
            tier.publish(staging, target)
    except StorageFailed as error:
        seen = error.members.get("outcome") == "unknown" if over else tier.size(f"{target}/{naming.COMMIT}") is not None
        if not seen:
            raise
        raise StorageFailed(
            f"outcome unknown: {target} is visible, but fsync of its parent directory failed: {error.detail}",
            hint="a power failure may lose the checkpoint; check the disk, then verify it",
            outcome="unknown",
        ) from error


def _replace(tier: Tier, staging: str, target: str, aside: str) -> None:
    """Put what is staged in the place of another checkpoint, which then stands in staging/: a cut leaves one or the other.

    A file system that cannot exchange names takes two renames. `put_back` mends what a crash leaves between them.
    """
    if tier.exchange(staging, target):
        return
    tier.remove_tree(aside)  # of an earlier time: `target` stands
    tier.publish(target, aside)
    try:
        tier.publish(staging, target)
    except CheckpointError as error:
        if error.members.get("outcome") != "unknown":
            tier.publish(aside, target)
        raise


def put_back(tier: Tier, alone: Callable[[str], AbstractContextManager[object]] = lambda run: nullcontext()) -> list[str]:
    """At start, before staging/ is swept: give back its place to what was being replaced when all ended between two renames.

    What a replacement left there goes only once the names under checkpoints/ are durable: until then it may be what a power
    cut brings back. Returns what was put back. `alone` keeps other nodes from replacing
    checkpoints of a run meanwhile.
    """
    back = []
    for run in filter(naming.is_run_name, tier.list("")):
        if _whole_in_staging(tier, run):
            with alone(run):
                back += _put_back(tier, run)
    return back


def _whole_in_staging(tier: Tier, run: str) -> list[str]:
    staged = f"{run}/{naming.STAGING}"
    return [name for name in tier.list(staged) if tier.size(f"{staged}/{name}/{naming.COMMIT}") is not None]


def _put_back(tier: Tier, run: str) -> list[str]:
    back = []
    staged, whole = f"{run}/{naming.STAGING}", _whole_in_staging(tier, run)
    for name in whole:
        found = naming.parse_staging_directory(name)
        if found is None or found.attempt != naming.REPLACED_ATTEMPT:
            continue
        target = naming.checkpoint_path(run, found.step)
        if not tier.list(target):
            tier.publish(f"{staged}/{name}", target)
            back.append(target)
    if whole and tier.list(f"{run}/{naming.CHECKPOINTS}"):
        tier.sync_directory(f"{run}/{naming.CHECKPOINTS}")
        tier.sync_directory(staged)
    return back


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
    return Manifest(
        format=manifest.FORMAT,
        run=plan.run,
        step=plan.step,
        attempt=plan.attempt,
        created=created,
        world=plan.world,
        mesh=plan.mesh,
        metrics=plan.metrics,
        files=(*sorted(written.values(), key=lambda e: e.name), *small),
        tensors=tensors,
        aliases=plan.aliases,
        restored=lineage.restored,
        turn=lineage.turn,
        rewinds=lineage.rewinds,
    )


def _extents(receipts: Sequence[Receipt]) -> dict[tuple[str, str], list[Extent]]:
    """What all nodes have written of each tensor. Most nodes have nothing of most tensors."""
    found: dict[tuple[str, str], list[Extent]] = {}
    for receipt in receipts:
        for group, names in receipt.extents.items():
            for name, extents in names.items():
                found.setdefault((group, name), []).extend(extents)
    return found


def _read_receipts(tier: Tier, staging: str) -> list[Receipt]:
    names = tier.list(f"{staging}/{naming.RECEIPTS}")
    return [decode_receipt(tier.read(f"{staging}/{naming.RECEIPTS}/{name}")) for name in names]


def encode_index(plan: WritePlan, group: str) -> bytes:
    """A group's index file."""
    return index.encode(file.layout for file in plan.files if file.layout.group == group)


def _put(tier: Tier, staging: str, name: str, data: bytes) -> FileEntry:
    tier.put(f"{staging}/{name}", data)
    return FileEntry(name, len(data), 0, digest(data))
