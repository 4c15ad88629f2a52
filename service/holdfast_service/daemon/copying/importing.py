"""Import a checkpoint into staging: a Hugging Face directory is packed again, a Holdfast checkpoint is copied.

The source is not trusted: headers are validated, links are not followed, and digests are computed while writing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from holdfast_formats import naming
from holdfast_formats.decoding import decoder
from holdfast_formats.digest import digest
from holdfast_formats.disk import manifest, safetensors, state_json
from holdfast_formats.disk.manifest import Extent, FileEntry, Manifest
from holdfast_formats.disk.packing import FilePlan, pack, tensor_extent_bytes
from holdfast_formats.errors import CorruptManifest, InvalidRequest, LimitExceeded, StateMismatch
from holdfast_formats.lineage import Way
from holdfast_formats.staging.plan import PlannedAsset, PlannedFile, PlannedTensor, Receipt, WritePlan, encode_receipt
from holdfast_formats.staging.slot_table import ASSET_BYTES_MAX, Blob
from holdfast_formats.tensors import TensorSpec
from holdfast_service.daemon.copying import recognition
from holdfast_service.daemon.copying.copies import CopyStopped, Going, ManifestPair, carry, read_pair
from holdfast_service.storage import Readable, Tier

GROUP = "model"
INDEX = naming.index_file_name(GROUP)
INDEX_BYTES_MAX = 2**28
_NOT_ASSETS = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".h5",
    ".msgpack",
    ".gguf",
)
_HINT = "pass the directory of a Hugging Face model with regular files"


class Goal(NamedTuple):
    """The imported checkpoint: its run, step and attempt, its staging directory, and its rewinds."""

    run: str
    step: int
    attempt: int
    staging: str
    rewinds: Way = ()


class _Place(NamedTuple):
    """Where a tensor stands in the source."""

    spec: TensorSpec
    file: str
    start: int


def is_checkpoint(source: Readable) -> bool:
    """Whether the source is a Holdfast checkpoint."""
    return source.size(naming.COMMIT) is not None


def plan_import(source: Readable, goal: Goal) -> WritePlan:
    """The plan of packing a Hugging Face directory.

    Raises `StateMismatch` for what is more than such a model, or other (`recognition`), and when headers and index disagree;
    `InvalidRequest` where there is no safetensors file, `CorruptManifest` for a header or an index that cannot be true,
    `LimitExceeded` for an asset that is too large.
    """
    places = _places(source)
    assets = tuple(PlannedAsset(0, Blob(name, 0, source.size(name) or 0)) for name in _assets(source))
    return WritePlan(
        run=naming.check_run(goal.run),
        step=naming.check_step(goal.step),
        attempt=goal.attempt,
        world=1,
        groups=(GROUP,),
        files=tuple(_planned(layout) for layout in pack(place.spec for place in places.values())),
        aliases={},
        assets=assets,
        metrics={},
        mesh={},
        state=state_json.merge(goal.step, {}, (GROUP,), {0: {}}),
    )


def pack_anew(source: Readable, target: Tier, plan: WritePlan, goal: Goal, going: Going) -> None:
    """Write the planned files and their receipt into staging, durably; `CopyStopped`, and errors of the two tiers."""
    places = _places(source)
    files: list[FileEntry] = []
    for asset in plan.assets:
        data = source.read(asset.blob.name)
        target.put(f"{goal.staging}/{asset.blob.name}", data)
        files.append(FileEntry(asset.blob.name, len(data), 0, digest(data)))
    extents: dict[str, tuple[Extent, ...]] = {}
    for file in plan.files:
        layout = file.layout
        writer = target.create(f"{goal.staging}/{layout.name}", layout.bytes)
        try:
            writer.write(0, [layout.header])
            for tensor in file.tensors:
                buffer = np.empty(
                    min(tensor_extent_bytes(tensor.spec.nbytes, plan.extent_bytes), tensor.spec.nbytes), np.uint8
                )
                found = []
                for offset in range(0, tensor.spec.nbytes, max(len(buffer), 1)):
                    part = buffer[: min(len(buffer), tensor.spec.nbytes - offset)]
                    _fill(source, places[tensor.spec.name], offset, part, going)
                    found.append(Extent(offset, len(part), digest(part)))
                    writer.write(tensor.start + offset, [part])
                extents[tensor.spec.name] = tuple(found)
            writer.finish()
        finally:
            writer.discard()
        files.append(FileEntry(layout.name, layout.bytes, len(layout.header), digest(layout.header)))
    receipt = Receipt("import", plan.run, plan.step, plan.attempt, tuple(files), {GROUP: extents})
    target.put(f"{goal.staging}/{naming.RECEIPTS}/import.json", encode_receipt(receipt))


def copy_in(source: Readable, target: Tier, goal: Goal, going: Going) -> ManifestPair:
    """Copy a Holdfast checkpoint into staging, verify every byte, and return COMMIT and manifest under its new name.

    Raises `Damaged` if the source does not match its digests.
    """
    pair = read_pair(source, "")
    made, state = _renamed(pair.made, source.read(naming.STATE), goal)
    carry(source, "", target, goal.staging, pair.made, going)
    if made == pair.made:
        return pair
    target.remove_file(f"{goal.staging}/{naming.STATE}")
    target.put(f"{goal.staging}/{naming.STATE}", state)
    encoded = manifest.encode(made)
    return ManifestPair(manifest.encode_commit(made, encoded), encoded, made)


def counted(made: Manifest) -> WritePlan:
    """A plan that takes as much room as a checkpoint, for whoever asks whether it fits."""
    files = tuple(PlannedFile(FilePlan(file.name, GROUP, b"", (), file.bytes), ()) for file in made.files)
    return WritePlan(made.run, made.step, made.attempt, made.world, (), files, {}, (), made.metrics, made.mesh, b"")


def _renamed(made: Manifest, state: bytes, goal: Goal) -> tuple[Manifest, bytes]:
    """The manifest and state.json as they are under another run, step or attempt; the step stands in both."""
    if made.step != goal.step:
        document = json.loads(state)
        document["step"] = goal.step
        state = json.dumps(document, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"
    changed = FileEntry(naming.STATE, len(state), 0, digest(state))
    files = tuple(changed if file.name == naming.STATE else file for file in made.files)
    renamed = msgspec.structs.replace(made, run=goal.run, step=goal.step, attempt=goal.attempt, files=files)
    if made.run != goal.run:  # it has come by the rewinds of another run, which lead nowhere here
        renamed = msgspec.structs.replace(renamed, restored=None, turn=0, rewinds=goal.rewinds)
    return renamed, state


def _fill(source: Readable, place: _Place, offset: int, part: np.ndarray, going: Going) -> None:
    if going.ended():
        raise CopyStopped
    if source.read_into(place.file, place.start + offset, part) != part.nbytes:
        raise CorruptManifest(f"{place.file} became shorter while it was read", hint=_HINT, file=place.file)
    going.moved(part.nbytes)


def _places(source: Readable) -> dict[str, _Place]:
    """Every tensor of the source, from its headers; the index, where there is one, must say the same."""
    names = source.list("")
    weight_map = _weight_map(source) if INDEX in names else None
    files = sorted(set(weight_map.values())) if weight_map is not None else recognition.weights(names)
    if not files:
        raise InvalidRequest("there is no safetensors file in the source", hint=_HINT)
    if weight_map is None:
        recognition.check_shards(files)
    places: dict[str, _Place] = {}
    for file in files:
        for place in _in_file(source, file):
            name = place.spec.name
            if name in places:
                raise StateMismatch(f"tensor {name!r} is in {places[name].file} and in {file}", hint=_HINT, tensor=name)
            places[name] = place
    if weight_map is not None:
        wrong = {name for name, place in places.items() if weight_map.get(name) != place.file} | (weight_map.keys() - places)
        if wrong:
            raise StateMismatch(f"{INDEX} and the files disagree about tensor {min(wrong)!r}", hint=_HINT, tensor=min(wrong))
    recognition.check_names(names, {*files, INDEX})
    recognition.check_tensors([(place.spec, place.file) for place in places.values()], recognition.read_config(source))
    return places


def _weight_map(source: Readable) -> Mapping[str, str]:
    if (source.size(INDEX) or 0) > INDEX_BYTES_MAX:
        raise LimitExceeded(f"{INDEX} is over the limit of {INDEX_BYTES_MAX} bytes", hint=_HINT)
    try:
        found = _decode_index(source.read(INDEX)).weight_map
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CorruptManifest(f"cannot read {INDEX}: {error}", hint=_HINT, file=INDEX) from error
    for name, file in found.items():
        if not naming.is_file_name(file) or not file.endswith(".safetensors"):
            raise InvalidRequest(
                f"{INDEX} maps tensor {name!r} to {file!r}, which does not exist in that directory", hint=_HINT
            )
    return found


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


_decode_index = decoder(_Index)


def _in_file(source: Readable, file: str) -> list[_Place]:
    size = source.size(file)
    if size is None:
        raise InvalidRequest(
            f"{file} is not a regular file", hint="symbolic links are not followed: copy their targets", file=file
        )
    first = source.read(file, 0, safetensors.LENGTH_BYTES)
    try:
        length = safetensors.header_length(first, size, file)
        header = safetensors.decode(source.read(file, 0, safetensors.LENGTH_BYTES + length), size, file)
    except CorruptManifest as error:
        raise CorruptManifest(error.detail, hint=_HINT, file=file) from error
    recognition.check_metadata(file, header.metadata)
    places = []
    for tensor in header.tensors:
        spec = TensorSpec(GROUP, tensor.name, tensor.dtype, tensor.shape)
        spec.check()
        places.append(_Place(spec, file, header.header_bytes + tensor.start))
    return places


def _assets(source: Readable) -> Sequence[str]:
    """The plain files beside the weights whose names the format does not use itself."""
    found = []
    for name in source.list(""):
        size = source.size(name)
        if size is None or name.endswith(_NOT_ASSETS) or not naming.is_asset_name(name):
            continue
        if size > ASSET_BYTES_MAX:
            raise LimitExceeded(
                f"{name} has {size} bytes, over the limit of {ASSET_BYTES_MAX} bytes for a file other than the weights"
            )
        found.append(name)
    return found


def _planned(layout: FilePlan) -> PlannedFile:
    return PlannedFile(layout, tuple(PlannedTensor(spec, start, (), "") for spec, start in layout.tensors))
