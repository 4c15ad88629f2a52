"""Load a committed checkpoint into the live state."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch

from holdfast.config import launch_info
from holdfast.launch import Launch
from holdfast.layout import rules_choice
from holdfast.left_out import LeftOutNote
from holdfast.link.session import Session
from holdfast.read.memory_load import Filled, fill
from holdfast.read.overwrite_guard import OVERWRITTEN, Overwriting, unnoticed
from holdfast.read.reader import CheckpointReader
from holdfast.read.requests import Want
from holdfast.restore import program_hint
from holdfast.restore.rank_values import RankState, state_of_rank
from holdfast.state.exclusion import OwnPatterns
from holdfast.state.masters import Masters
from holdfast.state.train_state import OfferedLeaves, TrainState
from holdfast.tensors.casting import check as check_casts
from holdfast.tensors.casting import leaves_apart
from holdfast.tensors.device_meshes import KnownMesh
from holdfast.tensors.leaves import Key, Leaf, covers, is_ignored
from holdfast.tensors.live_pieces import LivePiece
from holdfast.tensors.matching import LISTED_MAX, MatchedLeaves
from holdfast.tensors.torch_dtypes import UNSIGNED, as_integers
from holdfast_files.objects.traffic import RequestCount
from holdfast_formats.disk import coded, state_json
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import CheckpointError
from holdfast_formats.layout import language
from holdfast_formats.programs import remade
from holdfast_formats.staging.average import GROUP as EMA


class RestoreTarget(NamedTuple):
    """A wanted tensor part, and the device copy that follows if the CPU cannot write the live tensor."""

    want: Want
    piece: LivePiece
    bounce: torch.Tensor | None


def targets_of(leaves: Sequence[Leaf]) -> list[RestoreTarget]:
    """The target of every leaf's bytes: live CPU memory, or a bounce buffer for a device tensor."""
    targets = []
    for leaf in leaves:
        for piece in leaf.pieces:
            raw = as_integers(piece.tensor, UNSIGNED)
            bounce = None if raw.device.type == "cpu" else torch.empty(raw.shape, dtype=raw.dtype, device="cpu")
            array = (raw if bounce is None else bounce).numpy()
            targets.append(RestoreTarget(Want(leaf.group, leaf.name, piece.box, array), piece, bounce))
    return targets


def finish(targets: Sequence[RestoreTarget]) -> None:
    with torch.no_grad():
        for target in targets:
            if target.bounce is not None:
                as_integers(target.piece.tensor, UNSIGNED).copy_(target.bounce)


Origin = Literal["slot", "peers", "directory", "bucket", "http"]  # or the name of a copy, such as `tier cloud`


class RestoreReport(NamedTuple):
    """The result of a restore, in `checkpointer.last_restore`. Names are `group/name`.

    Attributes:
        step: The restored step.
        missing: Wanted by the live state, not in the checkpoint, left as they were.
        unexpected: In the checkpoint, not wanted.
        notes: Values that were mapped by a rule rather than restored unchanged.
        bytes: Bytes written into this rank's state.
        seconds: How long it took, in seconds.
        source: Where most bytes came from: `"directory"` or `"bucket"`; `"slot"`, the memory that they were saved from;
            `"peers"`, other nodes' memory; `"http"`, the daemon; `"tier NAME"` or `"replica NAME"`, a copy of the daemon's.
        bytes_read: Bytes of the checkpoint's files: whole extents, each counted once.
        bytes_by: The same, by where they came from.
        requests: Requests of this rank to object storage, by kind: how many were sent, how many of them repeated one that
            had failed, and bytes of their bodies and of the answers'. Empty if nothing was read from a bucket.

    Example:
        >>> checkpointer.restore(strict=False)
        1500
        >>> checkpointer.last_restore.missing
        ('model/new_head.weight',)
    """

    step: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    notes: tuple[str, ...]
    bytes: int
    seconds: float
    source: Origin | str = "directory"
    bytes_read: int = 0
    bytes_by: Mapping[Origin | str, int] = MappingProxyType({})
    requests: Mapping[str, RequestCount] = MappingProxyType({})


class WantedPart(NamedTuple):
    """Which part of a checkpoint to restore, whether names may be missing, whether to verify everything first, and what
    to do about full-precision masters and other float dtypes.
    """

    groups: Collection[str] | None
    exclude: Sequence[str]
    strict: bool
    prove_first: bool = False
    masters: Masters | None = None
    cast: bool = False
    keep: Sequence[str] = ()
    requantise: bool = False


class RestoringRank(NamedTuple):
    run: str
    launch: Launch
    session: Session
    state: TrainState
    average: Callable[[CheckpointReader], tuple[str, ...]] | None = None  # restores what the daemon keeps for this rank


def load(reader: CheckpointReader, rank: RestoringRank, wanted: WantedPart) -> RestoreReport:
    """Fill the live state of a rank, from the in-memory checkpoint if there is one.

    Raises `StateMismatch` before it changes anything, and `CorruptExtent` with file, tensor and range. Live tensors
    partly overwritten by then are recorded in `state.wholeness`, and the error names them.
    """
    _, launch, session, state, average = rank
    reader.cores, reader.peers = _own_cores(), launch.peers
    layout = None if state.declared is None else state.declared.layout
    derived = state.mesh_of_tensors() if launch.world > 1 else KnownMesh(None)  # a single rank is rank 0
    own = state_of_rank(reader.contents, reader.state, launch.rank, state.mesh, derived)
    config = None if layout is None else rules_choice.config_of(reader)
    stored = _stored(reader.contents, own, config)._replace(imported=state_json.source_of(reader.state) is not None)
    left_out_notes = _left_out_notes(wanted.exclude, stored, state.groups())
    groups = wanted.groups
    if average is not None:  # the group is the daemon's: nothing live has it
        stored = stored._replace(specs={group: of for group, of in stored.specs.items() if group != EMA})
        groups = None if groups is None else set(groups) - {EMA}
    with program_hint.named(stored, reader, (layout and language.text(layout)) or f"dp={launch.world}"):
        restoration = _prepared(state, stored, groups, wanted)
    _check_program(state, reader.contents, {leaf.key for leaf in restoration.leaves})

    def fill_apart(leaves: Sequence[Leaf]) -> None:
        apart = targets_of([_own(leaf, reader.contents, own) for leaf in leaves])
        wants = [target.want for target in apart]
        fill(reader, wants, session.link, launch.rank, Overwriting(_nothing))
        finish(apart)

    restoration.check_ties(fill_apart)
    targets = targets_of([_own(leaf, reader.contents, own) for leaf in restoration.leaves])
    wants = [target.want for target in targets]
    apart = Counter(reader.copies.taken)
    names = [*(leaf.path for leaf in restoration.leaves), *restoration.renewed]
    size = sum(want.target.nbytes for want in wants)
    tear = partial(state.wholeness.tear, names)
    try:
        if wanted.prove_first and restoration.casts:  # whether values fit is not seen before they are read
            fill_apart(leaves_apart(restoration.leaves, restoration.casts))
            check_casts(restoration.casts)
        with _shown(f"restore {rank.run}@{reader.manifest.step}", size, launch.rank) as moved:
            filled = fill(reader, wants, session.link, launch.rank, Overwriting(tear, wanted.prove_first, moved))
        finish(targets)
        restoration.apply()
    except CheckpointError as error:
        if state.wholeness.torn:
            error.hint = OVERWRITTEN
        raise
    state.wholeness.mend(names)
    average_notes = () if average is None or (wanted.groups is not None and EMA not in wanted.groups) else average(reader)
    origins = _origins(filled, reader.copies.name or reader.source.origin, reader.copies.taken - apart)
    return RestoreReport(
        step=reader.manifest.step,
        missing=tuple(restoration.missing),
        unexpected=tuple(restoration.unexpected),
        notes=(*restoration.notes, *own.notes, *filled.notes, *_changed(reader.manifest), *left_out_notes, *average_notes),
        bytes=size,
        seconds=0.0,
        source=max(origins, key=lambda origin: origins[origin]),
        bytes_read=filled.bytes_read,
        bytes_by=origins,
        requests=reader.source.requests(),
    )


def _prepared(state: TrainState, stored: OfferedLeaves, groups: Collection[str] | None, wanted: WantedPart) -> MatchedLeaves:
    return state.prepare(
        stored,
        groups,
        wanted.exclude,
        wanted.strict,
        wanted.masters,
        cast=wanted.cast,
        keep=wanted.keep,
        requantise=wanted.requantise,
    )


@contextmanager
def _shown(what: str, size: int, rank: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on rank 0's terminal, if it takes long, and what is called with the bytes of each part."""
    if rank != 0 or sys.stderr is None or not sys.stderr.isatty():
        yield unnoticed
        return
    from holdfast.terminal import console  # with typer and rich

    with console.progress(what, size, shown=True) as bar:
        yield partial(bar.advance, bar.task_ids[0])


def _check_program(state: TrainState, manifest: Manifest, wanted: Set[Key]) -> None:
    """Check a mapping program's assumptions about these tensors' groups, and that it divides the tensors as when they were
    saved, before anything is overwritten.
    """
    declared = state.declared
    if declared is not None and declared.program and declared.compiled and declared.for_one_rank:
        for group in {group for group, _ in wanted} & manifest.tensors.keys():
            remade.check_assumed(manifest, group, declared.compiled)
        remade.check_divisions(manifest, wanted, declared.for_one_rank, declared.program)


def _nothing() -> None: ...


def _changed(manifest: Manifest) -> list[str]:
    if manifest.compacted is not None:
        text = coded.told(manifest.compacted)
        return [LeftOutNote(text) if manifest.compacted.lossy else text]
    if manifest.thinned is None:
        return []
    return [f"the checkpoint was thinned to its weights: it no longer has {', '.join(manifest.thinned.groups)}"]


def _left_out_notes(patterns: Sequence[str], stored: OfferedLeaves, live: Collection[str]) -> list[str]:
    """Notes on what the user's patterns leave out, and on patterns that match nothing, which are mostly misspelled. A
    pattern for a whole live group is deliberate if the checkpoint lacks that group.
    """
    if not patterns or isinstance(patterns, OwnPatterns):
        return []
    names = {
        (group, name) for of in (stored.specs, stored.aliases, stored.values) for group, held in of.items() for name in held
    }
    idle = [
        pattern
        for pattern in patterns
        if not any(covers(pattern, *name) for name in names) and not any(is_ignored(group, (pattern,)) for group in live)
    ]
    out = sorted("/".join(name) for name in names if any(covers(pattern, *name) for pattern in patterns))
    left = LeftOutNote(
        f"left out by exclude=, so not restored: {', '.join(out[:LISTED_MAX])}{', …' * (len(out) > LISTED_MAX)}"
    )
    missed = f"exclude= matches no name of the checkpoint: {', '.join(idle)}"
    return [left] * bool(out) + [missed] * bool(idle)


def _origins(filled: Filled, cold: str, elsewhere: Mapping[str, int]) -> Mapping[str, int]:
    """Bytes by source, in the order in which the sources are tried; of the files' some came from copies `elsewhere`."""
    found = {cold if origin == "files" else origin: size for origin, size in filled.bytes_by.items()}
    return {**found, cold: found.get(cold, 0) - sum(elsewhere.values()), **elsewhere} if elsewhere else found


def _own(leaf: Leaf, manifest: Manifest, own: RankState) -> Leaf:
    group, name = own.own(manifest, leaf.group, leaf.name)
    return leaf if name == leaf.name else leaf._replace(group=group, name=name)


def _own_cores() -> int:
    """The cores for this rank: all it may use, unless other ranks restore on them too."""
    allowed = len(os.sched_getaffinity(0))
    return allowed if allowed < (os.cpu_count() or 1) else max(allowed // (launch_info().local_world or 1), 1)


def _stored(manifest: Manifest, own: RankState, config: Mapping[str, Any] | None) -> OfferedLeaves:
    specs = {
        group: {name: (entry.dtype, entry.shape) for name, entry in tensors.items()}
        for group, tensors in manifest.tensors.items()
    }
    return OfferedLeaves(specs, manifest.aliases, own.values, config, own.stream)
