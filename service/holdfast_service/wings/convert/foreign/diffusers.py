"""Pipelines of diffusers: `model_index.json`, and a directory for each component.

A component's tensors are the group of its name. A checkpoint has no directories: the file `unet/config.json` is its asset
`unet.config.json`, which an export puts back. Names of components have no dots.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from holdfast_formats.errors import CorruptManifest, LimitExceeded, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import FileUse, ForeignListing, ForeignTensor, RefusedPart
from holdfast_formats.rest.jobs import IMPORT_KINDS, ReadOptions
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.foreign import directories, file_signs, hugging_face, leaving_out
from holdfast_service.wings.convert.foreign.kinds import ForeignKind

INDEX = "model_index.json"
FILES_BYTES_MAX = 2**28  # the small files of all components together, which are held in memory
_GROUP = re.compile(r"[a-z][a-z0-9_]{0,63}")
_OF_TRAINING = frozenset({"extra", "optim", "master", "ema"})  # groups that mean something else
_VARIANT = re.compile(r".+\.(fp16|bf16|fp32)(-\d{5}-of-\d{5})?\.safetensors|.+\.index\.(fp16|bf16|fp32)\.json")
_INDEX_ENDING = ".json"
_WAY_OUT = "load the pipeline and save it again: DiffusionPipeline.from_pretrained(SRC).save_pretrained(DIRECTORY)"


class Below:
    """The files of one directory below another one."""

    def __init__(self, files: Files, directory: str, hidden: frozenset[str] = frozenset()) -> None:
        self._files, self._directory, self._hidden = files, directory, hidden
        self.label = f"{files.label}/{directory}"

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return self._files.read(self._at(path), offset, length)

    def read_into(self, path: str, offset: int, buffer: Any) -> int:
        return self._files.read_into(self._at(path), offset, buffer)

    def read_stored(self, path: str, offset: int, buffer: Any) -> int:
        return self._files.read_stored(self._at(path), offset, buffer)

    def size(self, path: str) -> int | None:
        return self._files.size(self._at(path))

    def list(self, path: str) -> list[str]:
        names = self._files.list(self._at(path))
        return names if path else [name for name in names if name not in self._hidden]

    def stamp(self, path: str) -> str:
        return self._files.stamp(self._at(path))

    def hides(self, path: str) -> bool:
        return leaving_out.hides(self._files, self._at(path))

    def _at(self, path: str) -> str:
        return f"{self._directory}/{path}" if path else self._directory


class _Component(NamedTuple):
    """What a component adds to the listing: the bytes of its small files, by their names as assets, among others."""

    tensors: tuple[ForeignTensor, ...]
    uses: tuple[FileUse, ...]
    small: Mapping[str, bytes]
    notes: tuple[str, ...]
    refused: tuple[RefusedPart, ...]


def recognises(files: Files) -> bool:
    return files.size(INDEX) is not None


def components(index: Mapping[str, Any]) -> list[str]:
    """The names of the components that a pipeline loads, by its index."""
    return [
        name
        for name, source in index.items()
        if not name.startswith("_") and isinstance(source, list) and len(source) == 2 and all(source)
    ]


def read(files: Files, options: ReadOptions) -> ForeignListing:
    """Every tensor of every component, in a group of the component's name.

    Raises `StateMismatch` for other content, `CorruptManifest` for an invalid index or header, `LimitExceeded` for small
    files that are too large.
    """
    names, wanted = files.list(""), components(file_signs.read_object(files, INDEX))
    if not wanted:
        raise CorruptManifest(f"{INDEX} lists no component", hint="download it again", file=INDEX)
    for name in wanted:
        if not _GROUP.fullmatch(name) or name in _OF_TRAINING:
            raise StateMismatch(
                f"component {name!r} cannot be a group of a checkpoint", hint=f"import it alone: {name}", file=INDEX
            )
        if name not in names or files.size(name) is not None:
            raise file_signs.absent(files, name, f", and {INDEX} names it")
    top = [name for name in names if name not in wanted]
    others = hugging_face.sorted_out(files, top)
    for name in others.assets:
        if name.partition(".")[0] in wanted:
            raise StateMismatch(f"{name} has the name of a component's file", hint=f"remove {name}", file=name)
    read_components = [_component(files, name, options) for name in wanted]
    small = {name: data for one in read_components for name, data in one.small.items()}
    _check_size(sum(map(len, small.values())))
    return ForeignListing(
        KIND.name,
        {tensor.key: tensor for one in read_components for tensor in one.tensors},
        (*others.uses, *(use for one in read_components for use in one.uses)),
        assets=others.assets,
        made_assets=small,
        notes=tuple(dict.fromkeys(note for one in read_components for note in one.notes)),
        refused=(*others.refused, *(part for one in read_components for part in one.refused)),
    )


def _component(files: Files, name: str, options: ReadOptions) -> _Component:
    """A model, or a scheduler, tokenizer and the like, which are small files only."""
    names = files.list(name)
    variants = frozenset(one for one in names if _VARIANT.fullmatch(one))
    safe = [one for one in names if one.lower().endswith(".safetensors")]
    alone = not any(one not in variants for one in safe)  # there is only one precision, whose index has another name
    hidden = frozenset(one for one in variants if not alone or one.endswith(_INDEX_ENDING))
    inner = Below(files, name, hidden)
    if safe:
        listing = hugging_face.read(inner, options)
    else:
        pickled = next((one for one in names if one.lower().endswith((".bin", ".msgpack", ".pt", ".pth", ".ckpt"))), None)
        if pickled is not None:
            raise StateMismatch(f"{name}/{pickled}: {name} has no safetensors file", hint=_WAY_OUT, file=f"{name}/{pickled}")
        listing = _small_files(inner)
    uses = [use._replace(file=f"{name}/{use.file}") for use in listing.files]
    why = "it lists the tensors of the files" if alone else "weights in another precision: not compared, not imported"
    uses += [FileUse(f"{name}/{one}", "unused", why) for one in sorted(hidden)]
    _check_size(sum(inner.size(one) or 0 for one in listing.assets))
    small = {f"{name}.{one}": inner.read(one) for one in listing.assets}
    tensors = tuple(_in_group(tensor, name) for tensor in listing.tensors.values())
    notes = [f"{name}: {note}" for note in listing.notes]
    notes += [f"{name}: {safe[0]} is read, as there is no file without a variant"] if safe and alone else []
    refused = tuple(part._replace(name=f"{name}/{part.name}") for part in listing.refused)
    return _Component(tensors, tuple(uses), small, tuple(notes), refused)


def _small_files(files: Files) -> ForeignListing:
    names = files.list("")
    assets = hugging_face.assets_of(files, names)
    uses = [FileUse(name, "asset") for name in assets]
    uses += [FileUse(name, "unused", directories.why_unused(files, name)) for name in names if name not in assets]
    return ForeignListing(KIND.name, {}, tuple(uses), assets=assets)


def _in_group(tensor: ForeignTensor, name: str) -> ForeignTensor:
    spec = TensorSpec(name, tensor.spec.name, tensor.spec.dtype, tensor.spec.shape)
    return tensor._replace(spec=spec, pieces=tuple(piece._replace(file=f"{name}/{piece.file}") for piece in tensor.pieces))


def _check_size(size: int) -> None:
    if size > FILES_BYTES_MAX:
        raise LimitExceeded(f"the small files of the pipeline have {size} bytes, over the limit of {FILES_BYTES_MAX}")


KIND = ForeignKind("diffusers", IMPORT_KINDS["diffusers"], recognises, read)
