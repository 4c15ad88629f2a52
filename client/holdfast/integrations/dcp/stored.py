"""A stored checkpoint under DCP's names for a state dict, whatever program saved it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from holdfast.integrations.dcp import names
from holdfast.state.rng import KEY as RANDOM
from holdfast.state.train_state import EXTRA, MASTER, OPTIM
from holdfast.tensors import json_values
from holdfast.tensors.leaves import RANK_PREFIX
from holdfast.tensors.torch_dtypes import local_shape, torch_dtype
from holdfast_formats.disk import state_json
from holdfast_formats.disk.manifests import Manifest, TensorEntry


@dataclass(frozen=True)  # a tuple would be taken apart with the values that it is in
class StoredLeaf:
    """Where a tensor is stored. `array`: a NumPy array, which DCP treats as a value."""

    group: str
    name: str
    array: bool = False


class Kept:
    """Placeholder of a value that was not stored: the live object keeps its own."""


KEPT = Kept()


def is_stored_tensor(value: object) -> bool:
    return isinstance(value, StoredLeaf) and not value.array


class StoredState:
    """Contents of a checkpoint by DCP name: tensors, and this rank's values."""

    def __init__(self, manifest: Manifest, state: bytes, rank: int) -> None:
        """Raises `CorruptManifest` if values cannot be read."""
        self._manifest = manifest
        self._trees = [_tree(manifest, values) for values in _values(state, rank)]
        self.leaves: dict[str, tuple[names.Path, Any]] = {}
        for tree in reversed(self._trees):  # this rank's own come last, and count
            self.leaves.update(names.flattened(tree, is_stored_tensor))

    def metadata(self) -> Metadata:
        """DCP's view: each tensor is one chunk. Names of other forms of the state dict are found, but not listed."""
        return Metadata(_Offered(self), planner_data={fqn: path for fqn, (path, _) in self.leaves.items()})

    def find(self, fqn: str) -> Any:
        """The tensor or value of a name, also of a flattened optimizer or an unflattened state dict; KeyError."""
        if fqn in self.leaves:
            return self.leaves[fqn][1]
        for tree in self._trees:
            for value in _under(tree, fqn):
                return value
        key = fqn.partition(".")[0]
        if any(_is_optimizer(tree.get(key)) for tree in self._trees) and names.is_implementation(fqn):
            return KEPT
        raise KeyError(fqn)

    def unused(self, asked: Collection[str]) -> dict[str, list[str]]:
        """By key, tensors of optimizers of which something else is requested."""
        found: dict[str, list[str]] = {}
        keys = {key for tree in self._trees for key, held in tree.items() if _is_optimizer(held)}
        for key in sorted(key for key in keys if any(fqn.startswith(f"{key}.") for fqn in asked)):
            kept = [fqn for fqn, (path, value) in self.leaves.items() if path[0] == key and is_stored_tensor(value)]
            tensors = {self.find(fqn) for fqn in asked if fqn.startswith(f"{key}.") and is_stored_tensor(self.find(fqn))}
            if kept and not tensors:
                found[key] = kept
        return found

    def described(self, fqn: str) -> TensorStorageMetadata | BytesStorageMetadata:
        leaf = self.find(fqn)
        if not isinstance(leaf, StoredLeaf) or leaf.array:
            return BytesStorageMetadata()
        entry = self.entry(leaf)
        dtype = torch_dtype(entry.dtype, leaf.name)
        size = torch.Size(local_shape(dtype, tuple(entry.shape)))
        return TensorStorageMetadata(
            TensorProperties(dtype=dtype), size, [ChunkStorageMetadata(torch.Size([0] * len(size)), size)]
        )

    def entry(self, stored: StoredLeaf) -> TensorEntry:
        aliases = self._manifest.aliases.get(stored.group, {})
        return self._manifest.tensors[stored.group][aliases.get(stored.name, stored.name)]


class _Offered(dict[str, Any]):
    """The metadata of each name. Names of other forms of the state dict are computed on demand."""

    def __init__(self, stored: StoredState) -> None:
        super().__init__({fqn: stored.described(fqn) for fqn in stored.leaves})
        self._stored = stored

    def __contains__(self, fqn: object) -> bool:
        if super().__contains__(fqn):
            return True
        try:
            self._stored.find(str(fqn))
        except KeyError:
            return False
        return True

    def __missing__(self, fqn: str) -> Any:
        return self._stored.described(fqn)


def _values(state: bytes, rank: int) -> Iterator[Mapping[str, Mapping[str, str]]]:
    """This rank's values, then those that only other ranks have."""
    own = state_json.for_rank(state, rank).values
    yield own
    ranked = {group: state_json.by_rank(state, group) for group in own}
    others = sorted({other for held in ranked.values() for by in held.values() for other in by} - {rank})
    for other in others:
        yield {group: {key: by[other] for key, by in held.items() if other in by} for group, held in ranked.items() if held}


def _tree(manifest: Manifest, values: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """The nested state dict, with StoredLeaf objects as tensors."""
    tree: dict[str, Any] = {}
    for group in manifest.tensors.keys() | values.keys():
        held = [*manifest.tensors.get(group, {}), *manifest.aliases.get(group, {})]
        texts = values.get(group, {})
        if group == OPTIM:
            _add_optimizers(tree, held, texts, manifest)
        elif group == EXTRA:
            _add_extra(tree, held, texts)
        else:
            tree[group] = {name: StoredLeaf(group, name) for name in held}
            tree[group].update({key: _decoded(group, key, text) for key, text in texts.items()})
    return tree


def _decoded(group: str, key: str, text: str) -> Any:
    return json_values.loads(text, key, lambda kind, name: StoredLeaf(group, name, kind == "array"), made=False)


def _add_optimizers(tree: dict[str, Any], held: list[str], texts: Mapping[str, str], manifest: Manifest) -> None:
    tensors: dict[str, dict[str, StoredLeaf]] = {}
    for name in held:
        owner, _, key = name.rpartition("/")
        tensors.setdefault(owner, {})[key] = StoredLeaf(OPTIM, name)
    for key, text in texts.items():
        document = _decoded(OPTIM, key, text)
        groups = list(document["groups"].values())
        state: dict[str, dict[str, Any]] = {}
        for name in (name for group in groups for name in group["params"]):
            kept = {**tensors.get(name, {}), **document["state"].get(name, {})}
            for master, owners in document["masters"].items():
                if name in owners and name in manifest.tensors.get(MASTER, {}):
                    kept[master] = StoredLeaf(MASTER, name)
            if kept:
                state[name] = kept
        tree[key] = {"state": state, "param_groups": groups}


def _add_extra(tree: dict[str, Any], held: list[str], texts: Mapping[str, str]) -> None:
    streams = any(name.startswith(RANK_PREFIX) and f"/{RANDOM}/" in name for name in held)
    referred: set[str] = set()
    for key, text in texts.items():
        referred.update(json_values.referred(text))
        if key != RANDOM or not streams:  # a Checkpointer's own, which no state dict has
            tree[key] = _decoded(EXTRA, key, text)
    for name in held:
        if name not in referred and not name.startswith(RANK_PREFIX):
            key, slash, rest = name.partition("/")
            if slash:
                tree.setdefault(key, {})[rest] = StoredLeaf(EXTRA, name)
            else:
                tree[key] = StoredLeaf(EXTRA, name)


def _is_optimizer(held: object) -> bool:
    return isinstance(held, dict) and held.keys() == {"state", "param_groups"} and isinstance(held["param_groups"], list)


def _under(tree: Mapping[str, Any], fqn: str) -> Iterator[Any]:
    """The value of a name that is no leaf: a flattened optimizer, or a mapping or list without tensors."""
    for key, held in tree.items():
        if _is_optimizer(held) and fqn.startswith(f"{key}."):
            hyper = names.flattened_hyper(held)
            if fqn.removeprefix(f"{key}.") in hyper:
                yield hyper[fqn.removeprefix(f"{key}.")]
    yield from _inner(tree, fqn)


def _inner(held: Any, fqn: str) -> Iterator[Any]:
    items = held.items() if isinstance(held, Mapping) else enumerate(held) if isinstance(held, list) else ()
    for key, value in items:
        if str(key) == fqn:
            if not any(is_stored_tensor(leaf) for _, leaf in names.flattened({"": value}, is_stored_tensor).values()):
                yield value
        elif fqn.startswith(f"{key}."):
            yield from _inner(value, fqn.removeprefix(f"{key}."))
