"""Checkpoints of Orbax, as MaxText and other programs of JAX save them: arrays of zarr in an OCDBT database, or each in a
directory of its own.

A step's directory has items. The names of tensors are the paths in the item's tree, joined with dots as Orbax does it, after
the item's name if several have arrays.

    first name of the path                group
    params, model                         model
    opt_state, optimizer                  optim
    ema, ema_params                       ema
    any other, beside params or model     extra
    any other                             model
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast_files.opened import join
from holdfast_formats.errors import CorruptManifest, NotCommitted, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping import reading
from holdfast_formats.mapping.listing import FileUse, ForeignListing, ForeignTensor, PartLeftOut, RefusedPart, TensorKey
from holdfast_formats.rest.jobs import IMPORT_KINDS, ReadOptions
from holdfast_service.wings.convert.foreign import file_signs, hugging_face, json_values
from holdfast_service.wings.convert.foreign.dcp.directories import walk
from holdfast_service.wings.convert.foreign.kinds import ForeignKind
from holdfast_service.wings.convert.foreign.leaving_out import LeftOutParts, matching
from holdfast_service.wings.convert.foreign.orbax import ocdbt, zarr
from holdfast_service.wings.convert.foreign.orbax.ocdbt import AGAIN, MANIFEST, StoredValue
from holdfast_service.wings.convert.foreign.orbax.zarr import LOAD

TREE, ABOUT, STRINGS, JSON_ITEM = "_METADATA", "_CHECKPOINT_METADATA", "_strings.json", "metadata"
TREE_BYTES_MAX = 2**28
EXTRA = "extra"
_MODEL, _GROUPS = ("params", "model"), {"opt_state": "optim", "optimizer": "optim", "ema": "ema", "ema_params": "ema"}
_OF_ORBAX = (TREE, ABOUT, "_sharding", "commit_success.txt", "array_metadatas", "descriptor")
_PARTS = re.compile(r"ocdbt\.process_\d+")  # of processes, to which the merged index refers
_OLDER = "checkpoint"  # the file of an older layout
_ABOUT_DOCUMENT = "orbax"
_WHY_UNUSED = "Orbax's index, or data of it that the index does not refer to"


def recognises(files: Files) -> bool:
    """A directory of one step, or of one item of it."""
    names = files.list("")
    known = MANIFEST in names or TREE in names or any(map(_PARTS.fullmatch, names))
    return known or any(_has_arrays(files, item) for item in _items(files))


def read(files: Files, options: ReadOptions) -> ForeignListing:
    """Every array, text and JSON item. Raises `NotCommitted` for a save that was not finished, what `ocdbt.read` and
    `zarr.read` raise, and `CorruptManifest` for a tree that has no such array.
    """
    return _Reading(files, options).listing()


class _Reading:
    def __init__(self, files: Files, options: ReadOptions) -> None:
        self._files, self._options, self._left = files, options, LeftOutParts(options)
        self._tensors: dict[TensorKey, ForeignTensor] = {}
        self._documents: dict[str, Any] = {}
        self._uses: dict[str, FileUse] = {}
        self._refused: list[RefusedPart] = []

    def listing(self) -> ForeignListing:
        _check_finished(self._files)
        items = [item for item in _items(self._files) if _has_arrays(self._files, item)]
        whole_step = _has_arrays(self._files, "") or not items
        for item in [""] if whole_step else items:
            self._item(item, f"{item}." if len(items) > 1 else "")
        assets = self._others([] if whole_step else items)
        listed = [self._uses.get(path, FileUse(path, "unused", _WHY_UNUSED)) for path in walk(self._files)]
        documents = {EXTRA: self._documents} if self._documents else {}
        notes = ["names are the paths in the tree of JAX; optimizer state keeps the names that optax gave it"]
        step = self._step()
        left: tuple[PartLeftOut, ...] = self._left.parts
        return ForeignListing(
            KIND.name, self._tensors, tuple(listed), documents, assets, tuple(notes), step,
            refused=tuple(self._refused), left_out=left,
        )  # fmt: skip

    def _item(self, item: str, prefix: str) -> None:
        """Add the arrays and texts of an item under their names."""
        values = _values(self._files, item)
        names = sorted({key.rpartition("/")[0] for key in values if key.rpartition("/")[2] in zarr.METADATA and "/" in key})
        tree = _tree(self._files, item)
        texts = self._texts(item)
        left = self._options.leave_out
        missing = [one for one in tree.keys() - set(names) - texts.keys() if not matching(left, (prefix + one, one))]
        if missing:
            what = f"{join(item, TREE)} names {min(missing)!r}, which is not stored"
            raise CorruptManifest(what, hint=AGAIN, file=join(item, TREE), tensor=min(missing))
        first = {prefix + name: (prefix + name).partition(".")[0] for name in names}
        has_model = any(one in _MODEL for one in first.values())
        for name in names:
            full = prefix + name
            if self._left.takes_key(full):
                continue
            group = _GROUPS.get(first[full], "model" if first[full] in _MODEL or not has_model else EXTRA)
            self._array(name, TensorKey(group, full), values, tree.get(name, False))
        for name, text in texts.items():
            self._documents[prefix + name] = text
        about = _object(self._files, join(item, TREE)).get("custom_metadata")
        if about:
            self._documents[f"{prefix}custom_metadata"] = json_values.encode(about, _other)
        for path in {value.file for value in values.values() if value.inline is not None}:
            self._uses.setdefault(path, FileUse(path, "state"))

    def _array(self, name: str, key: TensorKey, values: Mapping[str, StoredValue], complete: bool) -> None:
        try:
            grid, stored = zarr.read(self._files, name, values)
        except StateMismatch as error:
            self._refused.append(RefusedPart(key.name, error, key.group))
            return
        if complete and None in stored:
            raise CorruptManifest(f"{stored.count(None)} chunks of {key.name!r} are missing", hint=AGAIN, tensor=key.name)
        tensor = zarr.tensor(key.group, key.name, grid, stored)
        tensor.spec.check()
        self._tensors[key] = tensor
        for one in stored:
            if one is not None and one.inline is None:
                self._uses[one.file] = FileUse(one.file, "tensors")

    def _texts(self, item: str) -> dict[str, str]:
        path = join(item, STRINGS)
        if self._files.size(path) is None:
            return {}
        self._uses[path] = FileUse(path, "state")
        held = _object(self._files, path)
        return {name: text for name, text in held.items() if isinstance(text, str)}

    def _others(self, items: list[str]) -> tuple[str, ...]:
        """Keep JSON items and small files; refuse items that only their own handlers read. Returns the assets."""
        about = _object(self._files, ABOUT)
        kept = {key: about[key] for key in ("custom_metadata", "metrics") if about.get(key)}
        if kept:
            self._documents[_ABOUT_DOCUMENT] = json_values.encode(kept, _other)
            self._uses[ABOUT] = FileUse(ABOUT, "state")
        plain = []
        for name in self._files.list(""):
            if name in (*items, *_OF_ORBAX, STRINGS) or self._is_own(name):
                continue
            if name == _OLDER:
                what = f"{name} holds values that Orbax kept beside the arrays in an older layout"
                self._refused.append(RefusedPart(name, StateMismatch(what, hint=LOAD, file=name), ""))
            elif self._files.size(name) is not None:
                plain.append(name)
            elif self._files.size(join(name, JSON_ITEM)) is not None and not _has_arrays(self._files, name):
                path = join(name, JSON_ITEM)
                self._documents[name] = json_values.encode(_object(self._files, path), _other)
                self._uses[path] = FileUse(path, "state")
            else:
                what = f"{name} is an item of the checkpoint that only the program that wrote it reads"
                self._refused.append(RefusedPart(name, StateMismatch(what, hint=LOAD, file=name), ""))
        sorted_out = hugging_face.sorted_out(self._files, plain)
        self._refused += sorted_out.refused
        self._uses |= {use.file: use for use in sorted_out.uses}
        return sorted_out.assets

    def _is_own(self, name: str) -> bool:
        """Whether a name is of the item that this directory is."""
        return (
            name in (MANIFEST, "d")
            or bool(_PARTS.fullmatch(name))
            or any(self._files.size(join(name, one)) is not None for one in zarr.METADATA)
        )

    def _step(self) -> int | None:
        """The number `step` of the tree, if there is one."""
        for key, tensor in self._tensors.items():
            if key.name.rpartition(".")[2] == "step" and key.group == EXTRA and tensor.spec.dtype[0] in "IU":
                values = reading.fetched(self._files, tensor) if not tensor.spec.shape else None
                return int(values) if values is not None and values >= 0 else None
        return None


def _check_finished(files: Files) -> None:
    about = _object(files, ABOUT)
    parts = any(map(_PARTS.fullmatch, files.list("")))
    if about.get("commit_timestamp_nsecs", 1) is None or (parts and files.size(MANIFEST) is None):
        raise NotCommitted("Orbax has not finished this save", hint="import a step whose save completed", file=ABOUT)


def _items(files: Files) -> Iterator[str]:
    """The directories of a step's items."""
    if files.size(ABOUT) is not None or files.size("descriptor/descriptor.pbtxt") is not None:
        yield from (name for name in files.list("") if files.size(name) is None)


def _has_arrays(files: Files, item: str) -> bool:
    return files.size(join(item, MANIFEST)) is not None or files.size(join(item, TREE)) is not None


def _values(files: Files, item: str) -> dict[str, StoredValue]:
    """Everything stored by its key: in a database, or in files, whose paths are the keys."""
    if files.size(join(item, MANIFEST)) is not None:
        return ocdbt.read(files, item)
    found: dict[str, StoredValue] = {}
    for name in files.list(item):
        if any(files.size(join(item, f"{name}/{one}")) is not None for one in zarr.METADATA):
            for path in walk(files, join(item, name)):
                found[path[len(item) + 1 :] if item else path] = StoredValue(path, 0, files.size(path) or 0)
    return found


def _tree(files: Files, item: str) -> dict[str, bool]:
    """The names that the tree has values for; True if all chunks of it are stored, also those that are all zeros."""
    document = _object(files, join(item, TREE))
    complete = document.get("store_array_data_equal_to_fill_value") is True
    found: dict[str, bool] = {}
    entries = document.get("tree_metadata", {})
    for entry in entries.values() if isinstance(entries, dict) else ():
        try:
            name = ".".join(str(one["key"]) for one in entry["key_metadata"])
            if not entry["value_metadata"].get("skip_deserialize"):
                found[name] = complete
        except (KeyError, TypeError, AttributeError) as error:
            path = join(item, TREE)
            raise CorruptManifest(f"{path} has an entry without its keys and value", hint=AGAIN, file=path) from error
    return found


def _object(files: Files, path: str) -> dict[str, Any]:
    """A file's JSON object; empty if there is no file."""
    return {} if files.size(path) is None else file_signs.read_object(files, path, TREE_BYTES_MAX)


def _other(trail: json_values.Trail, value: Any) -> Any:
    raise StateMismatch(f"{json_values.path_of(trail)} is no JSON", hint=LOAD)


KIND = ForeignKind("orbax", IMPORT_KINDS["orbax"], recognises, read)
