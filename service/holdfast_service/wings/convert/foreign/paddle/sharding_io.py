"""Checkpoints of `sharding_io`, which zero-cost checkpoints (ZCC) write too, and older ones without `model_meta.json`.

Every rank has its own pickles: the weights, the optimizer with its masters, and an average. The optimizer refers to
parameters by static names. Sharding stage 1 v2 cuts them out of a flat buffer, v1 gives each parameter to one rank.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from holdfast_formats.errors import CorruptManifest, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import ForeignListing, TensorKey
from holdfast_formats.region import Shape
from holdfast_formats.rest.jobs import IMPORT_KINDS, ReadOptions
from holdfast_service.wings.convert.foreign import computed
from holdfast_service.wings.convert.foreign.kinds import ForeignKind
from holdfast_service.wings.convert.foreign.paddle import flat, progress, tensor_parallel, unused_files
from holdfast_service.wings.convert.foreign.paddle.gathering import Gathering, read_json, renamed
from holdfast_service.wings.convert.foreign.paddle.pickled_dicts import read_dict, refuse_rest
from holdfast_service.wings.convert.foreign.paddle.static_names import META, RankPlace, StaticNames, every_place, place_of
from holdfast_service.wings.convert.foreign.paddle.tensor_parallel import LocalTensorParts
from holdfast_service.wings.convert.foreign.stored_arrays import StoredArray

NAME = "paddle-sharding-io"
MASTERS, SCHEDULER = "master_weights", "LR_Scheduler"
_FILE = re.compile(r"(model_state|optimizer|ema)((?:[._](?:tp|pp|shard|sharding|moe|ep)\d+)*)\.(pdparams|pdopt)")


def recognises(files: Files) -> bool:
    kinds = {match[1] for name in files.list("") if (match := _FILE.fullmatch(name))}
    return "optimizer" in kinds or "model_state" in kinds


def read(files: Files, options: ReadOptions) -> ForeignListing:
    """The listing of such a directory; `StateMismatch` and `CorruptManifest` by key and file."""
    names = files.list("")
    held = {name: match for name in names if (match := _FILE.fullmatch(name))}
    unused_files.check_signals(names, len({match[2] for match in held.values()}))
    gathering = Gathering(files, options)
    meta = read_json(files, META) if META in names else None
    ranks = _ranks(held)
    reader = RankReader(gathering, StaticNames(meta))
    for kind in ("model_state", "optimizer", "ema"):
        for place, name in sorted(ranks.get(kind, {}).items()):
            reader.read(kind, place, name)
    reader.list_all()
    return gathering.listing(NAME, names, sorted((*held, *((META,) if meta is not None else ()))))


def _ranks(held: Mapping[str, re.Match[str]]) -> dict[str, dict[RankPlace, str]]:
    """Each kind's files by rank. `CorruptManifest` if a rank lacks the files of one kind."""
    by_kind: dict[str, dict[RankPlace, str]] = defaultdict(dict)
    for name, match in held.items():
        place = place_of(match[2])
        if place in by_kind[match[1]]:
            raise StateMismatch(f"{name} and {by_kind[match[1]][place]} belong to the same rank", file=name)
        by_kind[match[1]][place] = name
    most = RankPlace(
        *(max(places) + 1 for places in zip(*(place for files in by_kind.values() for place in files), strict=True))
    )
    for kind, files in by_kind.items():
        # Weights may be those of one sharding rank: then their names say nothing of sharding.
        whole = kind == "model_state" and not any("shard" in name for name in files.values())
        sizes = most._replace(shard=1) if whole else most
        if len(files) == prod(sizes):
            continue
        missing = next(RankPlace(*numbers) for numbers in every_place(sizes) if RankPlace(*numbers) not in files)
        rank = ", ".join(
            f"{axis} {number}" for axis, number, size in zip(missing._fields, missing, sizes, strict=True) if size > 1
        )
        raise CorruptManifest(
            f"there is no file of rank {rank} beside {max(files.values())}",
            hint="copy the files of all nodes",
            file=f"{kind} of rank {rank}",
        )
    return by_kind


class RankReader:
    """Reads the ranks' files, and lists their joint contents: by group, parameter and type, then by rank."""

    def __init__(self, gathering: Gathering, naming: StaticNames) -> None:
        self.gathering, self.naming = gathering, naming
        self._parts: dict[tuple[str, str, str], dict[RankPlace, LocalTensorParts]] = defaultdict(dict)
        self._degree = 1

    def read(self, kind: str, place: RankPlace, path: str) -> None:
        """Read the tensors of one file. Weights come first: they may name the parameters."""
        saved = read_dict(self.gathering.files, path, (MASTERS,))
        self._degree = max(self._degree, place.tp + 1)
        if kind == "optimizer":
            scheduler = saved.rest.get(SCHEDULER)
            if scheduler is not None:
                self.gathering.progress.documents.setdefault("paddle_scheduler", progress.document(scheduler))
            for key, tensor in saved.tensors.items():
                name, state = self.naming.split(place, key, path)
                self._parts["optim", name, state][place] = tensor
        else:
            if kind == "model_state":
                self.naming.add(place, saved)
            for name, tensor in saved.tensors.items():
                self._parts["model" if kind == "model_state" else "ema", name, ""][place] = tensor
        for key, tensor in saved.inner.get(MASTERS, {}).items():
            name, rest = self.naming.split(place, f"{key}_", path)
            assert not rest
            self._parts["ema" if kind == "ema" else "master", name, ""][place] = tensor
        refuse_rest(path, {key: value for key, value in saved.rest.items() if key != SCHEDULER or kind != "optimizer"})

    def list_all(self) -> None:
        gathering = self.gathering
        gathering.names.update(name for _, name, _ in self._parts)
        moments: dict[str, dict[str, Any]] = defaultdict(dict)
        for (group, name, state), held in self._parts.items():
            if group != "optim":
                gathering.weight(self._whole(name, held).tensor(group, name), name)
            elif state in progress.POWERS and not gathering.options.as_is:
                gathering.powers(held.values())
            else:
                shaped = {place: held[place] for place in held} if state not in progress.POWERS else {}
                local_tensor_parts = self._whole(name, shaped) if shaped else _all_equal(list(held.values()))
                moments[name][state] = local_tensor_parts.tensor("optim", f"{name}/{state}")
        for name, states in moments.items():
            gathering.moments(name, states)
        self._weights_of_masters()
        if any(group == "ema" for group, _, _ in self._parts):
            gathering.notes.append("group ema is Paddle's average as stored: it starts at zero, without bias correction")

    def _weights_of_masters(self) -> None:
        """List unsaved weights, which are rounded masters."""
        dtypes = set()
        for place, parameter in self.naming.parameters():
            key, master = TensorKey("model", parameter.name), TensorKey("master", parameter.name)
            if key in self.gathering.tensors:
                continue
            canonical = self.naming.canonical(place, parameter.name)
            saved = self.gathering.tensors.get(TensorKey("model", canonical))
            if saved is not None:  # tied: the weight of another name
                self.gathering.tensors[key] = renamed(saved, *key)
                continue
            dtype, held = parameter.dtype or self.gathering.half, self.gathering.tensors.get(master)
            if held is None or dtype is None:
                raise StateMismatch(
                    f"{parameter.name!r} of tensor-parallel rank {place.tp}, stage {place.pp} is in no file: neither its "
                    "weight nor its master",
                    hint="copy the files of all ranks",
                    tensor=parameter.name,
                )
            same = dtype == held.spec.dtype
            self.gathering.tensors[key] = renamed(held, *key) if same else computed.rounded(held, key, dtype)
            dtypes.add(dtype)
        if dtypes:
            self.gathering.notes.append(
                f"weights were not saved: they are rounded from their master copies to {', '.join(sorted(dtypes))}"
            )

    def _whole(self, name: str, held: Mapping[RankPlace, LocalTensorParts]) -> LocalTensorParts:
        """Join the ranks' parts of a tensor: first over sharding, then over tensor parallelism."""
        sharded: dict[tuple[int, int, int], list[LocalTensorParts]] = defaultdict(list)
        for place in sorted(held, key=lambda place: (place.tp, place.pp, place.moe, place.shard)):
            sharded[place.tp, place.pp, place.moe].append(held[place])
        by_rank: dict[int, list[LocalTensorParts]] = defaultdict(list)
        distributed: bool | None = None
        for (tp, pp, moe), slices in sharded.items():
            parameter = self.naming.parameter(RankPlace(tp, pp, 0, moe), name)
            distributed = parameter.distributed if distributed is None else distributed
            by_rank[tp].append(self._local(slices, parameter.shape))
        ranks = {tp: _all_equal(parts) for tp, parts in by_rank.items()}
        first = next(iter(ranks.values()))
        if self._degree == 1:
            return first
        shape = tensor_parallel.whole_shape(name, first.shape, self._degree) if distributed is not False else first.shape
        if shape is None:
            if distributed:
                raise first.odd(f"Holdfast does not know along which dimension {name!r} is split")
            shape = first.shape
        fused = tensor_parallel.proportions(name, self.gathering.config)
        return tensor_parallel.joined(ranks, self._degree, shape, fused)

    def _local(self, slices: Sequence[LocalTensorParts], shape: Shape | None) -> LocalTensorParts:
        flat_slices = self.naming.flat and shape is not None and len(shape) == 1 and len(slices) > 1
        if shape is None or (all(one.shape == shape for one in slices) and not flat_slices):
            return _all_equal(slices)
        return flat.assembled([_stored(one) for one in slices], shape)


def _all_equal(parts: Sequence[LocalTensorParts]) -> LocalTensorParts:
    """The first part; the others must have the same bytes."""
    first = parts[0]
    for other in parts[1:]:
        if (other.dtype, other.shape) != (first.dtype, first.shape):
            raise other.odd(f"but {first.file} has it as {first.dtype} of shape {list(first.shape)}")
        if other.decoder is not None:
            raise other.odd("pickles of protocol 2 cannot be compared: save it again with a newer Paddle")
    return first._replace(copies=(*first.copies, *(piece for other in parts[1:] for piece in other.pieces)))


def _stored(part: LocalTensorParts) -> StoredArray:
    if part.decoder is not None or len(part.pieces) != 1:
        raise part.odd("pickles of protocol 2 cannot be combined: save it again with a newer Paddle")
    return part.stored()


KIND = ForeignKind(NAME, IMPORT_KINDS[NAME], recognises, read)
