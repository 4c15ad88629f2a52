"""A plain Hugging Face model: safetensors files in one directory, with an index, numbered, or a single one.

`hugging_face_names` lists what is refused. Links of a hub's snapshot are followed when the directory is opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from holdfast_formats import naming
from holdfast_formats.decoding import decoder
from holdfast_formats.errors import CorruptManifest, InvalidRequest, LimitExceeded, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import FileUse, ForeignListing, ForeignTensor, PartLeftOut, RefusedPart, TensorKey
from holdfast_formats.rest.jobs import IMPORT_KINDS, ReadOptions
from holdfast_formats.staging.slot_table import ASSET_BYTES_MAX
from holdfast_service.wings.convert.foreign import directories, hugging_face_names, leaving_out, quantisation, sixteen_bits
from holdfast_service.wings.convert.foreign.kinds import ForeignKind
from holdfast_service.wings.convert.foreign.stored_arrays import read_safetensors

GROUP = "model"
DIFFUSERS = "diffusion_pytorch_model"  # the group of a component of diffusers: files are called so, and loaded by that name
INDEX = naming.index_file_name(GROUP)
INDEX_BYTES_MAX = 2**28
_ENDING = ".safetensors"
_NOT_ASSETS = (_ENDING, ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".h5", ".msgpack", ".gguf")
_HINT = "pass a complete Hugging Face model directory; symbolic links are not followed"


def recognises(files: Files) -> bool:
    """Whether there are weights at all; `last`, since other programs leave such files beside their own."""
    return any(name.lower().endswith(_ENDING) for name in files.list(""))


def read(files: Files, options: ReadOptions) -> ForeignListing:
    """Every tensor of the model, from the files' headers; an index must agree.

    Raises `StateMismatch` for anything beyond such a model, and if headers and index disagree; `InvalidRequest` if there is
    no safetensors file, `CorruptManifest` for an invalid header or index, `LimitExceeded` for an asset that is too large.
    """
    names = files.list("")
    index = next(
        (naming.index_file_name(group) for group in (GROUP, DIFFUSERS) if naming.index_file_name(group) in names), None
    )
    weight_map = _weight_map(files, index) if index is not None else None
    weights = sorted(set(weight_map.values())) if weight_map is not None else hugging_face_names.weights(names)
    if not weights:
        raise InvalidRequest("there is no safetensors file in the source", hint=_HINT)
    if weight_map is None:
        hugging_face_names.check_shards(files, weights)
    group = DIFFUSERS if all(file.startswith(DIFFUSERS) for file in weights) else GROUP
    tensors: dict[TensorKey, ForeignTensor] = {}
    for file in weights:
        for tensor in in_file(files, file, group, f", and {index} names it" if index else ""):
            name = tensor.spec.name
            if tensor.key in tensors:
                first = tensors[tensor.key].pieces[0].file
                raise StateMismatch(f"tensor {name!r} is in {first} and in {file}", hint=_HINT, tensor=name)
            tensors[tensor.key] = tensor
    if weight_map is not None and index is not None:
        _check_index(index, weight_map, tensors.values())
    config = hugging_face_names.read_config(files)
    taken = as_bfloat16(tensors.values(), config, options)
    taken = taken.noting(quantisation.notes(taken.tensors, config, names, options))
    uses = [FileUse(file, "tensors") for file in weights]
    if index is not None:
        uses.append(
            FileUse(index, "unused", "it lists the same tensors as the file headers; the import writes its own index")
        )
    return listed(KIND.name, files, taken, uses)


def listed(
    kind: str,
    files: Files,
    taken: TakenTensors,
    used: Sequence[FileUse],
    again: Sequence[FileUse] = (),
) -> ForeignListing:
    """The listing of these tensors, with the use of every file: those `used`, and those with the same tensors `again`.

    Refused are other files of a training.
    """
    known = {use.file for use in (*used, *again)}
    others = sorted_out(files, [name for name in files.list("") if name not in known])
    tensors = {tensor.key: tensor for tensor in taken.tensors}
    listing = ForeignListing(kind, tensors, (*used, *others.uses, *again), assets=others.assets, notes=taken.notes)
    return listing._replace(refused=(*others.refused, *taken.refused), left_out=taken.left_out)


class OtherFiles(NamedTuple):
    """The files beside the weights: those to copy, and what is refused. Each has a use, or is refused."""

    uses: tuple[FileUse, ...]
    assets: tuple[str, ...]
    refused: tuple[RefusedPart, ...]


def sorted_out(files: Files, names: Sequence[str]) -> OtherFiles:
    """What the other files and directories of these names are. Raises `LimitExceeded` for an asset that is too large."""
    copies, refused = hugging_face_names.sorted_out(names)
    known = {part.name for part in refused} | {use.file for use in copies}
    assets = assets_of(files, [name for name in names if name not in known])
    unused = []
    for name in names:
        if name not in known and name not in assets:
            try:
                unused.append(FileUse(name, "unused", why_unused(files, name)))
            except StateMismatch as error:
                refused += (RefusedPart(name, error, ""),)
    return OtherFiles((*copies, *(FileUse(name, "asset") for name in assets), *unused), assets, refused)


def _check_index(index: str, weight_map: Mapping[str, str], tensors: Iterable[ForeignTensor]) -> None:
    files_by_name = {tensor.spec.name: tensor.pieces[0].file for tensor in tensors}
    wrong = {name for name, file in files_by_name.items() if weight_map.get(name) != file} | (
        weight_map.keys() - files_by_name
    )
    if wrong:
        raise StateMismatch(f"{index} and the files disagree about tensor {min(wrong)!r}", hint=_HINT, tensor=min(wrong))


def _weight_map(files: Files, index: str) -> Mapping[str, str]:
    weight_map = read_index(files, index)
    for name, file in weight_map.items():
        if not naming.is_file_name(file) or not file.lower().endswith(_ENDING):
            raise InvalidRequest(f"{index} maps tensor {name!r} to {file!r}, which is not in the directory", hint=_HINT)
    return {name: file for name, file in weight_map.items() if not leaving_out.hides(files, file)}


def read_index(files: Files, index: str) -> dict[str, str]:
    """Each tensor's file by an index; `CorruptManifest` for an invalid one, `LimitExceeded` beyond any model's size."""
    if (files.size(index) or 0) > INDEX_BYTES_MAX:
        raise LimitExceeded(f"{index} is over the limit of {INDEX_BYTES_MAX} bytes", hint=_HINT, file=index)
    try:
        return _decode_index(files.read(index)).weight_map
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CorruptManifest(f"cannot read {index}: {error}", hint=_HINT, file=index) from error


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


_decode_index = decoder(_Index)


def in_file(files: Files, file: str, group: str = GROUP, why: str = "") -> list[ForeignTensor]:
    """The tensors of one safetensors file, from its header. `why` it is needed."""
    held = read_safetensors(files, file, why=why, hint=_HINT)
    hugging_face_names.check_format(file, held.format)
    quantisation.check_metadata(file, held.metadata)
    tensors = [array.tensor(group, array.key) for array in held.arrays]
    for tensor in tensors:
        tensor.spec.check()
    return tensors


class TakenTensors(NamedTuple):
    """Tensors, assumptions about their dtypes, and what else of their files is refused or left out."""

    tensors: tuple[ForeignTensor, ...]
    notes: tuple[str, ...] = ()
    refused: tuple[RefusedPart, ...] = ()
    left_out: tuple[PartLeftOut, ...] = ()

    def noting(self, more: Iterable[str]) -> TakenTensors:
        return self._replace(notes=(*self.notes, *more))


def as_bfloat16(found: Iterable[ForeignTensor], config: Mapping[str, Any], options: ReadOptions) -> TakenTensors:
    """Tensors of safetensors files, BF16 where integers are its bits; `StateMismatch` if that is not certain."""
    tensors = tuple(found)
    stored = (sixteen_bits.StoredDtype(one.spec.name, one.spec.dtype, one.pieces[0].file) for one in tensors)
    dtype = sixteen_bits.taken_for_bfloat16(stored, config, options.int16)
    if dtype is None:
        return TakenTensors(tensors)
    return TakenTensors(tuple(sixteen_bits.with_bfloat16(one, dtype) for one in tensors), (sixteen_bits.note(dtype),))


def assets_of(files: Files, names: Iterable[str]) -> tuple[str, ...]:
    """The plain files beside the weights, except names of the format itself."""
    assets = []
    for name in names:
        size = files.size(name)
        if size is None or name.lower().endswith(_NOT_ASSETS) or not naming.is_asset_name(name):
            continue
        if size > ASSET_BYTES_MAX:
            raise LimitExceeded(
                f"{name} has {size} bytes, over the limit of {ASSET_BYTES_MAX} bytes for a file other than the weights"
            )
        assets.append(name)
    return tuple(assets)


def why_unused(files: Files, name: str) -> str:
    """Why a name beside the weights is not copied, if it is not a file with tensors. `StateMismatch` for a directory that
    may have some.
    """
    if files.size(name) is None:
        return directories.why_unused(files, name)
    return "a checkpoint cannot hold a file of this name"


KIND = ForeignKind("hf", IMPORT_KINDS["hf"], recognises, read, last=True)
