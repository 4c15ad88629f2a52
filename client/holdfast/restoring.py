"""From a committed checkpoint into the live state: what is wanted, where it comes from, and what became of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from holdfast_formats import values
from holdfast_formats.manifest import Manifest

from . import optimizer_names, rulebook, staging
from .reader import CheckpointReader
from .session import Session
from .sources import HttpSource
from .state import OPTIM, Stored, TrainState
from .warm import fill

_OPTIMIZERS = f"{OPTIM}/"


class RestoreReport(NamedTuple):
    """What a restore did. Names are `group/name`."""

    step: int
    missing: tuple[str, ...]  # wanted by the live state, not in the checkpoint, left as they were
    unexpected: tuple[str, ...]  # in the checkpoint, not wanted
    notes: tuple[str, ...]  # what was mapped by a rule rather than restored as it was
    bytes: int
    seconds: float
    source: Literal["slot", "directory", "http"] = "directory"  # "slot": out of the memory that it was saved from


class Wanted(NamedTuple):
    """Which part of a checkpoint is to be restored, and whether names may be missing."""

    groups: Collection[str] | None
    ignore: Sequence[str]
    strict: bool


def load(reader: CheckpointReader, state: TrainState, who: tuple[Session, int], wanted: Wanted) -> RestoreReport:
    """Fill the live state of this rank, out of the slots that hold the step where there are any.

    Raises `StateMismatch` before anything is touched, `CorruptExtent` naming file, tensor and range.
    """
    session, rank = who
    encoded = reader.state
    held = values.for_rank(encoded, rank)
    stored = _stored(reader.manifest, held, _merged(encoded, held))
    if state.declared is not None:
        stored = stored._replace(config=rulebook.config_of(reader))
    restoration = state.prepare(stored, *wanted)
    landings = staging.land(restoration.leaves)
    wants = [landing.want for landing in landings]
    warm, notes = fill(reader, wants, session.held, rank)
    staging.finish(landings)
    restoration.apply()
    cold: Literal["directory", "http"] = "http" if isinstance(reader.source, HttpSource) else "directory"
    remapped = [
        f"{name}: taken from another rank of the saved world" for name in held.remapped if not name.startswith(_OPTIMIZERS)
    ]
    return RestoreReport(
        step=reader.manifest.step,
        missing=tuple(restoration.missing),
        unexpected=tuple(restoration.unexpected),
        notes=(*restoration.notes, *remapped, *notes),
        bytes=sum(want.into.nbytes for want in wants),
        seconds=0.0,
        source="slot" if warm else cold,
    )


def _merged(encoded: bytes, held: values.RankValues) -> dict[str, str]:
    """What optimizers say, of all ranks: each knew its own stage's parameters only. Of what several say, the rank's own."""
    if not any(name.startswith(_OPTIMIZERS) for name in held.ranked):
        return held.values.get(OPTIM, {})
    written = values.by_rank(encoded, OPTIM)
    own = held.values[OPTIM]
    return {key: optimizer_names.merged([text, *written.get(key, {}).values()]) for key, text in own.items()}


def _stored(manifest: Manifest, held: values.RankValues, optimizers: dict[str, str]) -> Stored:
    specs = {
        group: {name: (entry.dtype, entry.shape) for name, entry in tensors.items()}
        for group, tensors in manifest.tensors.items()
    }
    found = {**held.values, OPTIM: optimizers} if OPTIM in held.values else held.values
    return Stored(specs, manifest.aliases, found)
