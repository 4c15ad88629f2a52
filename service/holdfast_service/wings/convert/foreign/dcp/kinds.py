"""The directories of torch.distributed.checkpoint: its own, and Megatron-core's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from holdfast_files.opened import join
from holdfast_formats.errors import NotCommitted, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import FileUse, ForeignListing
from holdfast_formats.rest.jobs import IMPORT_KINDS, ReadOptions
from holdfast_service.wings.convert.foreign.dcp import directories, metadata, sharded_safetensors
from holdfast_service.wings.convert.foreign.dcp.arrangement import EXTRA, StateDictArrangement
from holdfast_service.wings.convert.foreign.dcp.gathering import GatheredListing, Unread
from holdfast_service.wings.convert.foreign.dcp.megatron import ALLOWED, MegatronArrangement
from holdfast_service.wings.convert.foreign.dcp.metadata import METADATA, SavedState, StoredAt
from holdfast_service.wings.convert.foreign.dcp.payloads import Payloads
from holdfast_service.wings.convert.foreign.kinds import ForeignKind
from holdfast_service.wings.convert.foreign.leaving_out import LeftOutParts

LIGHTNING = "meta.pt"
CONFIG, COMMON = "metadata.json", "common.pt"
_BACKEND = "torch_dist"


def is_dcp(files: Files) -> bool:
    """Whether a directory has the files of a DCP save, complete or not, or safetensors in shards."""
    names = files.list("")
    if CONFIG in names and backend(files, "") is not None:
        return False
    return METADATA in names or any(
        pattern.fullmatch(name)
        for name in names
        for pattern in (directories.OF_A_RANK, directories.METADATA_OF_A_RANK, directories.SHARD)
    )


def is_megatron(files: Files) -> bool:
    return backend(files, "") is not None


def read_dcp(files: Files, options: ReadOptions) -> ForeignListing:
    """A directory of `dcp.save`. Errors by key and file: `StateMismatch`, `NotCommitted`, `CorruptManifest`."""
    names = files.list("")
    if METADATA not in names:
        if any(directories.METADATA_OF_A_RANK.fullmatch(name) for name in names):
            raise StateMismatch(
                "each rank wrote its own metadata, and there is none for the whole checkpoint",
                hint="save with use_collectives=True, which is the default",
            )
        if any(directories.SHARD.fullmatch(name) for name in names):
            return sharded_safetensors.read(files, options.shards)
    whole = metadata.read(files)
    gathered = GatheredListing(files)
    saved = _pruned(whole, options, gathered)
    arrangement = StateDictArrangement(saved, Payloads(files, saved), gathered)
    known: dict[str, FileUse] = {}
    if options.as_is:
        arrangement.as_is()
        step = None
    else:
        step = arrangement.arrange()
    if LIGHTNING in names:
        known[LIGHTNING] = _of_lightning(files, gathered)
        step = _number(gathered, "lightning", "global_step", step)
    return _listing("dcp", gathered, directories.uses(files, whole, "", known), step)


def read_megatron(files: Files, options: ReadOptions) -> ForeignListing:
    """A directory `iter_…` of Megatron-LM in the format torch_dist."""
    return read_torch_dist(files, options, "megatron", "", "save with --ckpt-format torch_dist")


def read_torch_dist(
    files: Files,
    options: ReadOptions,
    kind: str,
    directory: str,
    again: str,
    others: Mapping[str, FileUse] = MappingProxyType({}),
) -> ForeignListing:
    """The torch_dist checkpoint in a directory of the source. `again` is how to save one, `others` are known files."""
    found = backend(files, directory)
    if found is None:
        raise NotCommitted(
            f"there is no {join(directory, CONFIG)}, which Megatron-core writes last",
            hint="import an iteration whose save completed",
        )
    if found != _BACKEND:
        raise StateMismatch(f"its format is {found!r}; only {_BACKEND} can be imported", hint=again)
    whole = metadata.read(files, directory)
    gathered = GatheredListing(files, ALLOWED)
    saved = _pruned(whole, options, gathered)
    known = {**others, join(directory, CONFIG): FileUse(join(directory, CONFIG), "state")}
    common = join(directory, COMMON)
    size, value = files.size(common), None
    if size is not None:
        value = gathered.value(StoredAt(common, 0, size))
        known[common] = _unread(common, value) or FileUse(common, "state")
    arrangement = MegatronArrangement(saved, Payloads(files, saved), gathered, value, common)
    step = arrangement.as_is() if options.as_is else arrangement.arrange()
    return _listing(kind, gathered, directories.uses(files, whole, directory, known), step)


def _pruned(saved: SavedState, options: ReadOptions, gathered: GatheredListing) -> SavedState:
    """The state without the keys that are left out; those that are refused otherwise are gathered."""
    left = LeftOutParts(options)
    tensors = {fqn: one for fqn, one in saved.tensors.items() if not left.takes_key(fqn, (one.nbytes,))}
    values = {fqn: at for fqn, at in saved.values.items() if not left.takes_key(fqn)}
    gathered.refused.extend(part for part in saved.refused if not left.takes_key(part.name))
    gathered.left_out.extend(left.parts)
    return saved._replace(tensors=tensors, values=values)


def _listing(kind: str, gathered: GatheredListing, uses: tuple[FileUse, ...], step: int | None) -> ForeignListing:
    return ForeignListing(
        kind,
        gathered.tensors,
        uses,
        gathered.documents,
        directories.assets(uses),
        tuple(gathered.notes),
        step,
        refused=tuple(gathered.refused),
        left_out=tuple(gathered.left_out),
    )


def backend(files: Files, directory: str) -> str | None:
    """The format in metadata.json of Megatron-core; None without this file."""
    path = join(directory, CONFIG)
    if files.size(path) is None:
        return None
    try:
        document: Any = json.loads(files.read(path, 0, 2**16))
    except (ValueError, RecursionError):
        return None
    backend = document.get("sharded_backend") if isinstance(document, dict) else None
    return backend if isinstance(backend, str) else None


def _of_lightning(files: Files, gathered: GatheredListing) -> FileUse:
    """Lightning's counters, schedulers, callbacks and hyper-parameters, as a document."""
    encoded = gathered.encoded(StoredAt(LIGHTNING, 0, files.size(LIGHTNING) or 0), EXTRA, "lightning")
    gathered.keep(encoded, EXTRA, "lightning", LIGHTNING)
    return _unread(LIGHTNING, encoded) or FileUse(LIGHTNING, "state")


def _unread(path: str, value: Any) -> FileUse | None:
    if not isinstance(value, Unread):
        return None
    return FileUse(path, "unused", f"it cannot be read without running code: {value.reason}")


def _number(gathered: GatheredListing, document: str, key: str, otherwise: int | None) -> int | None:
    values = gathered.documents.get(EXTRA, {}).get(document)
    number = values.get(key) if isinstance(values, dict) else None
    return number if type(number) is int and number >= 0 else otherwise


KINDS = (
    ForeignKind("dcp", IMPORT_KINDS["dcp"], is_dcp, read_dcp),
    ForeignKind("megatron", IMPORT_KINDS["megatron"], is_megatron, read_megatron),
)
