"""The source of an export: a committed checkpoint, or the listing of another program's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from holdfast_formats import naming
from holdfast_formats.disk import coded, state_json
from holdfast_formats.disk.manifests import Manifest, TensorEntry
from holdfast_formats.disk.packing import pack
from holdfast_formats.disk.read_planner import resolve
from holdfast_formats.files import Files
from holdfast_formats.mapping import equality
from holdfast_formats.mapping.coded_tensors import tensors_of
from holdfast_formats.mapping.committed_files import CommittedFiles, same_bytes
from holdfast_formats.mapping.listing import FileUse, ForeignListing, ForeignTensor, TensorKey
from holdfast_formats.region import whole

KIND = "holdfast"


class ExportSource(NamedTuple):
    """A checkpoint to export: its files, and the listing of their contents.

    The listing has `aliases` (by group: a tied tensor's other name, and its first one) as tensors like others. `ranked`
    names the values (group/key) that differ between ranks and so are not in the listing's documents. `equal` compares
    the bytes of two tensors.
    """

    files: Files
    listing: ForeignListing
    equal: Callable[[TensorKey, TensorKey], bool]
    aliases: Mapping[str, Mapping[str, str]] = {}
    ranked: tuple[str, ...] = ()

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(key.group for key in self.listing.tensors))

    def group(self, group: str) -> dict[str, ForeignTensor]:
        """The stored tensors of a group, by name, without aliases."""
        aliases = self.aliases.get(group, {})
        held = self.listing.tensors.items()
        return {key.name: tensor for key, tensor in held if key.group == group and key.name not in aliases}

    def ties(self, group: str) -> Mapping[str, str]:
        """The other names of a group's tied tensors, with the name that each is stored under."""
        return self.aliases.get(group, {})

    @property
    def assets(self) -> tuple[str, ...]:
        """The small files that are copied: the source's own, and translated ones."""
        return (*self.listing.assets, *self.listing.made_assets)

    def read_asset(self, name: str) -> bytes:
        asset = self.listing.made_assets.get(name)
        return self.files.read(name) if asset is None else asset


def of_committed(verified: CommittedFiles, manifest: Manifest) -> ExportSource:
    """The checkpoint of this manifest; of its files only state.json is read."""
    documents: dict[str, dict[str, Any]] = {}
    ranked: tuple[str, ...] = ()
    if manifest.file(naming.STATE) is not None:
        values = state_json.for_rank(verified.read(naming.STATE), 0)
        ranked = values.ranked
        documents = {
            group: {key: json.loads(text) for key, text in held.items() if f"{group}/{key}" not in ranked}
            for group, held in values.values.items()
        }
    uses = tuple(FileUse(file.name, _use(manifest, file.name)) for file in manifest.files)
    assets = tuple(use.file for use in uses if use.use == "asset")
    listing = ForeignListing(KIND, tensors_of(manifest), uses, documents, assets, step=manifest.step)

    def equal(one: TensorKey, other: TensorKey) -> bool:
        ones, others = (_stored_entries(manifest, key) for key in (one, other))
        return ones.keys() == others.keys() and all(same_bytes(ones[part], others[part]) for part in ones)

    return ExportSource(verified, listing, equal, coded.contents(manifest).aliases, ranked)


def of_listing(files: Files, listing: ForeignListing) -> ExportSource:
    """Another program's checkpoint, with its tensors in the order that an import would store them in.

    Reads nothing; comparisons read later. `StateMismatch` and `InvalidRequest` for impossible names of tensors and
    files.
    """
    packed = pack(tensor.spec for tensor in listing.tensors.values())
    keys = [TensorKey(spec.group, spec.name) for plan in packed for spec, _ in plan.tensors]
    tensors = {key: listing.tensors[key] for key in keys}
    for name in (*listing.assets, *listing.made_assets):
        naming.check_asset(name)
    listed = listing._replace(tensors=tensors, documents=_as_stored(listing))
    return ExportSource(files, listed, lambda one, other: equality.equal(files, tensors[one], tensors[other]))


def _as_stored(listing: ForeignListing) -> dict[str, dict[str, Any]]:
    """The documents as they would come out of an import's state.json, including the order of keys."""
    groups = tuple(sorted({key.group for key in listing.tensors} | listing.documents.keys()))
    first = listing.documents_of(listing.documents)[0]
    values = {group: {key: json.dumps(value) for key, value in held.items()} for group, held in first.items()}
    stored = state_json.for_rank(state_json.merge(listing.step or 0, {}, groups, {0: values}), 0)
    return {group: {key: json.loads(text) for key, text in held.items()} for group, held in stored.values.items()}


def _stored_entries(manifest: Manifest, key: TensorKey) -> dict[str, TensorEntry]:
    """The stored tensors from which a tensor is decoded, by part."""
    located = coded.find(manifest, *key)
    if located is None:
        return {"": resolve(manifest, *key)[1]}
    needed = coded.needs(manifest, key.group, located[0], whole(located[1].shape))
    return {f"{located[1].coding} {role}": resolve(manifest, box.group, box.name)[1] for role, box in needed.items()}


def _use(manifest: Manifest, file: str) -> Any:
    entry = manifest.file(file)
    if entry is not None and entry.header_bytes:
        return "tensors"
    ours = {naming.STATE} | {naming.index_file_name(group) for group in manifest.groups}
    return "state" if file in ours else "asset"
