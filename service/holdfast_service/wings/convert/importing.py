"""Stages an imported checkpoint: one of another program is mapped and streamed, a Holdfast checkpoint is copied.

The source is not trusted: unknown content is refused, links are not followed, and digests are computed while writing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from holdfast_files.opened import CommittedManifest, open_checkpoint
from holdfast_formats import dtypes, naming
from holdfast_formats.digest import digest, running
from holdfast_formats.disk import manifests, state_json
from holdfast_formats.disk.manifests import EXTENT_BYTES_MAX, FileEntry, Manifest
from holdfast_formats.disk.packing import FilePlan, pack
from holdfast_formats.errors import CorruptManifest, InvalidRequest, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.lineage import Way
from holdfast_formats.mapping import equality
from holdfast_formats.mapping.box_moves import MappedTensor
from holdfast_formats.mapping.listing import ForeignListing, TensorKey
from holdfast_formats.mapping.target_files import LiteralBytes, StreamedTensor, TargetFile
from holdfast_formats.naming import Place
from holdfast_formats.rest.jobs import ImportArguments
from holdfast_formats.staging.plan import PlannedAsset, PlannedFile, PlannedTensor, Receipt, WritePlan
from holdfast_formats.staging.slot_table import Blob
from holdfast_service.daemon.copying import streaming
from holdfast_service.daemon.copying.copies import CopyControl, carry
from holdfast_service.daemon.copying.streaming import StreamTarget
from holdfast_service.daemon.copying.watched_source import WatchedSource
from holdfast_service.storage import StagedFiles, read_once
from holdfast_service.wings.convert import mapping
from holdfast_service.wings.convert.foreign import hugging_face
from holdfast_service.wings.convert.foreign.kinds import choose
from holdfast_service.wings.convert.foreign.known_kinds import KINDS
from holdfast_service.wings.convert.mapping import Documents, MappedListing

_WEIGHTS_ALONE = ({hugging_face.GROUP}, {hugging_face.DIFFUSERS})
OURS = "holdfast"  # the kind of a checkpoint that Holdfast committed
_BESIDE = "extra"  # the group of a trainer's other state, which it expects to exist


class Goal(NamedTuple):
    """The imported checkpoint: its run, step and attempt, and its rewinds."""

    run: str
    step: int
    attempt: int
    rewinds: Way = ()


class PlannedImport(NamedTuple):
    """An import before its first byte is written. `plan` lacks the digests of the source in state.json."""

    source: WatchedSource
    listing: ForeignListing
    wanted: MappedListing
    files: tuple[TargetFile, ...]
    plan: WritePlan
    job: str
    node: str = ""
    chosen: Mapping[str, Any] = {}  # options that changed what was read
    about: Mapping[str, Any] = {}  # further members of its source in state.json

    @property
    def place(self) -> Place:
        """Where it is staged: the same for the same import of the same files, by the same node.

        A node that has lost its lease may still write, and must not share a place with the node that has taken its job.
        """
        return naming.job_place(self.plan.run, self.plan.step, digest(f"{self.node} {self.job}".encode()))

    @property
    def made_how(self) -> str:
        """A word for what was done."""
        return "merged" if self.listing.kind == "merge" else "imported"

    @property
    def bytes(self) -> int:
        return self.plan.bytes + sum(asset.blob.length for asset in self.plan.assets)


def is_ours(source: Files, kind: str | None, chosen: Mapping[str, Any]) -> bool:
    """Whether a source is a Holdfast checkpoint, which is read as it is.

    Raises `StateMismatch` for one without COMMIT, `InvalidRequest` for options that do not apply to it.
    """
    if kind not in (None, OURS):
        return False
    present = [source.size(name) is not None for name in (naming.MANIFEST, naming.STATE, naming.COMMIT)]
    if not present[2] and kind == OURS:
        raise InvalidRequest(f"the source has no {naming.COMMIT}", hint="leave --from out, or choose another kind")
    if present == [True, True, False]:
        raise StateMismatch(
            f"the source has the files of a Holdfast checkpoint, but no {naming.COMMIT}: it was not committed or not "
            "copied completely, and other kinds of import would drop its state.json",
            hint="copy the whole directory of a committed checkpoint",
            file=naming.COMMIT,
        )
    if present[2] and chosen:
        options = " and ".join(f"--{name.replace('_', '-')}" for name in chosen)
        raise InvalidRequest(
            "these options do not apply to a Holdfast checkpoint, which is imported unchanged", hint=f"leave {options} out"
        )
    return present[2]


def plan_import(source: Files, goal: Goal, options: ImportArguments) -> PlannedImport:
    """Plan an import, without reading tensors.

    Raises what `choose` and the kind's reader raise, `StateMismatch` for a source without tensors.
    """
    watched = WatchedSource(read_once(source), digested=True)
    kind = choose(watched, options.kind, KINDS, options.leave_out)
    listing = kind.read(watched, options)
    wanted = mapping.mapped(watched, listing, options.program)
    if not wanted.tensors and listing.left_out:
        options_used = dict.fromkeys(option for part in listing.left_out for option in part.options)
        raise InvalidRequest(f"every tensor was left out, by {' '.join(options_used)}", hint="leave out less")
    if not wanted.tensors:
        raise StateMismatch(f"{kind.title} has no tensors to import", hint="check the directory's path")
    return planned(watched, listing, wanted, goal)._replace(chosen=options.chosen)


def planned(watched: WatchedSource, listing: ForeignListing, wanted: MappedListing, goal: Goal) -> PlannedImport:
    """The files for these tensors, and beside them."""
    targets = {one.key: one for one in wanted.tensors}
    _refuse_unread(targets)
    groups = {key.group for key in targets} | wanted.documents.keys()
    if groups not in _WEIGHTS_ALONE:  # weights alone stay the directory that Hugging Face knows
        groups.add(_BESIDE)
    layouts = pack(one.spec for one in targets.values())
    files = tuple(_target(layout, targets) for layout in layouts)
    sizes = {name: watched.size(name) or 0 for name in listing.assets}
    sizes |= {name: len(data) for name, data in listing.made_assets.items()}
    for name in sizes:
        naming.check_asset(name)
    plan = WritePlan(
        run=naming.check_run(goal.run),
        step=naming.check_step(goal.step),
        attempt=goal.attempt,
        world=1,
        groups=tuple(sorted(groups)),
        files=tuple(_planned(layout) for layout in layouts),
        aliases={},
        assets=tuple(PlannedAsset(0, Blob(name, 0, size)) for name, size in sizes.items()),
        metrics={},
        mesh={},
        state=b"",
    )
    plan = plan._replace(state=_state(plan, listing.documents_of(wanted.documents)))
    job = streaming.digest_of(watched, listing.tensors, files)
    return PlannedImport(watched, listing, wanted, files, plan, job)


def _refuse_unread(targets: Mapping[TensorKey, MappedTensor]) -> None:
    for key, one in targets.items():
        if one.spec.dtype in dtypes.UNREAD:
            raise StateMismatch(
                f"tensor {key.name!r} is {one.spec.dtype}, which safetensors readers do not support",
                hint="convert it to an 8-bit type, or its bytes to U8, with the program that wrote it",
                tensor=key.name,
            )


def left_of(planned: PlannedImport, staged: StagedFiles) -> WritePlan:
    """The plan of what an earlier start of the same import has not staged yet, for the check of free space."""
    sizes = {name: staged.files.size(f"{staged.path}/{name}") for name in staged.files.list(staged.path)}
    files = tuple(file for file in planned.plan.files if sizes.get(file.layout.name) != file.layout.bytes)
    return planned.plan._replace(files=files)


def write(planned: PlannedImport, target: StreamTarget, going: CopyControl) -> Receipt:
    """Stage all files and assets, durably; `CopyStopped`, and what `streaming.stream` raises."""
    plan, staged = planned.plan, target.staged
    _check_assumed(planned, going)
    finished = streaming.stream(planned.source, planned.listing.tensors, planned.files, target, going)
    entries = [_entry(file.layout) for file in plan.files]
    for asset in plan.assets:
        asset_bytes = planned.listing.made_assets.get(asset.blob.name)
        if asset_bytes is None:
            entries.append(_put_asset(planned, staged, asset.blob, going))
            continue
        put_again(staged, asset.blob.name, asset_bytes)
        entries.append(FileEntry(asset.blob.name, len(asset_bytes), 0, digest(asset_bytes)))
    planned.source.check_unchanged([use.file for use in planned.listing.files if use.use != "unused"])
    planned.source.check_names()
    extents: dict[str, dict[str, Any]] = {}
    for file in finished:
        for one in file.tensors:
            extents.setdefault(one.group, {})[one.name] = one.extents
    return Receipt("import", plan.run, plan.step, plan.attempt, tuple(entries), extents)


def _check_assumed(planned: PlannedImport, going: CopyControl) -> None:
    """Read what the program takes for equal, or for zeros."""
    source, tensors = planned.source, planned.listing.tensors
    if planned.wanted.program is not None:
        planned.wanted.program.check_assumed(
            lambda one, other: equality.equal(source, tensors[one], tensors[other], going.check),
            lambda key: equality.zeros(source, tensors[key], going.check),
        )


def put_again(staged: StagedFiles, file: str, data: bytes) -> None:
    """Write a small file, of which a killed start may have left a part."""
    staged.drop(file)
    staged.put(file, data)


def _put_asset(planned: PlannedImport, staged: StagedFiles, blob: Blob, going: CopyControl) -> FileEntry:
    running_digest = running()
    staged.drop(blob.name)
    writer = staged.create(blob.name, blob.length)
    try:
        for at in range(0, blob.length, EXTENT_BYTES_MAX):
            going.check()
            part = np.empty(min(EXTENT_BYTES_MAX, blob.length - at), np.uint8)
            if planned.source.read_into(blob.name, at, part) != part.nbytes:
                raise CorruptManifest(
                    f"{blob.name} was truncated while being read",
                    hint="import it again when no process is writing it",
                    file=blob.name,
                )
            running_digest.update(part.data)
            writer.write(at, [part])
            going.moved(part.nbytes)
        writer.finish()
    finally:
        writer.discard()
    return FileEntry(blob.name, blob.length, 0, running_digest.hexdigest())


def _state(plan: WritePlan, documents: Mapping[int, Documents]) -> bytes:
    values = {
        rank: {group: {key: json.dumps(value) for key, value in held.items()} for group, held in of_rank.items()}
        for rank, of_rank in documents.items()
    }
    return state_json.merge(plan.step, {}, plan.groups, values)


def _target(layout: FilePlan, targets: Mapping[TensorKey, MappedTensor]) -> TargetFile:
    tensors = tuple(StreamedTensor(targets[TensorKey(spec.group, spec.name)], start) for spec, start in layout.tensors)
    return TargetFile(layout.name, layout.bytes, (LiteralBytes(0, layout.header),), tensors)


def _planned(layout: FilePlan) -> PlannedFile:
    return PlannedFile(layout, tuple(PlannedTensor(spec, start, (), "") for spec, start in layout.tensors))


def _entry(layout: FilePlan) -> FileEntry:
    return FileEntry(layout.name, layout.bytes, len(layout.header), digest(layout.header))


def copy_in(source: Files, staged: StagedFiles, goal: Goal, going: CopyControl) -> CommittedManifest:
    """Stage a copy of a Holdfast checkpoint, verify every byte, and return COMMIT and manifest under its new name.
    `Damaged` if the source does not match its digests.
    """
    pair = open_checkpoint(source, "")
    manifest_copied, state = _renamed(pair.manifest, source.read(naming.STATE), goal)
    carry(source, "", staged, pair.manifest, going)
    if manifest_copied == pair.manifest:
        return pair
    put_again(staged, naming.STATE, state)
    encoded = manifests.encode(manifest_copied)
    return CommittedManifest(manifests.encode_commit(manifest_copied, encoded), encoded, manifest_copied)


def counted(manifest: Manifest) -> WritePlan:
    """A plan of a checkpoint's size, for the check of free space."""
    files = tuple(PlannedFile(FilePlan(file.name, "", b"", (), file.bytes), ()) for file in manifest.files)
    return WritePlan(
        manifest.run,
        manifest.step,
        manifest.attempt,
        manifest.world,
        (),
        files,
        {},
        (),
        manifest.all_metrics,
        manifest.mesh,
        b"",
    )


def _renamed(manifest: Manifest, state: bytes, goal: Goal) -> tuple[Manifest, bytes]:
    """The manifest and state.json under another run, step or attempt; both contain the step."""
    if manifest.step != goal.step:
        document = json.loads(state)
        document["step"] = goal.step
        state = json.dumps(document, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"
    changed = FileEntry(naming.STATE, len(state), 0, digest(state))
    files = tuple(changed if file.name == naming.STATE else file for file in manifest.files)
    renamed = msgspec.structs.replace(manifest, run=goal.run, step=goal.step, attempt=goal.attempt, files=files)
    if manifest.run != goal.run:  # rewinds of another run lead nowhere here
        renamed = msgspec.structs.replace(renamed, restored=None, turn=0, rewinds=goal.rewinds)
    return renamed, state
