"""FlexCheckpoint, Paddle's distributed checkpoints: pickles of each rank's shards, and metadata with their places.

All is in Paddle's layout. The metadata may be those of an earlier save, because Paddle does not overwrite them:
contradictions with the files are refused.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from holdfast_formats.errors import CorruptManifest, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import ForeignListing, ForeignPiece, ForeignTensor
from holdfast_formats.region import Box, Shape, check_box, first_overlap
from holdfast_formats.rest.jobs import IMPORT_KINDS, ReadOptions
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.foreign.kinds import ForeignKind
from holdfast_service.wings.convert.foreign.paddle import progress, unused_files
from holdfast_service.wings.convert.foreign.paddle.gathering import Gathering, renamed
from holdfast_service.wings.convert.foreign.paddle.pickled_dicts import RECORDS, read_dict, refuse_rest
from holdfast_service.wings.convert.foreign.paddle.tensor_parallel import LocalTensorParts, of_arrays
from holdfast_service.wings.convert.foreign.pickles import PickledRecord, read_pickle
from holdfast_service.wings.convert.foreign.stored_arrays import StoredArray

NAME = "paddle-flex"
GROUPS = {"model_state": "model", "optimizer_state": "optim", "master_weight": "master", "ema_state": "ema"}
_MASTER = ".w_0"
_FILE = re.compile(r"(\d+)_\d+\.distcp")
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64", "int32": "I32", "int64": "I64"}
_STALE = "import another step: the metadata may be left from an earlier save into this directory"


def recognises(files: Files) -> bool:
    return any(_FILE.fullmatch(name) for state in GROUPS for name in files.list(state))


def read(files: Files, options: ReadOptions) -> ForeignListing:
    """The listing of a FlexCheckpoint; `StateMismatch` and `CorruptManifest` by key and file."""
    names = files.list("")
    files_by_state = {state: files.list(state) for state in GROUPS if state in names}
    writers = [int(match[1]) + 1 for held in files_by_state.values() for name in held if (match := _FILE.fullmatch(name))]
    unused_files.check_signals(names, max(writers, default=0))
    gathering = Gathering(files, options)
    by_state: dict[str, dict[str, ForeignTensor]] = {}
    used: list[str] = []
    for state, held in files_by_state.items():
        reader = StateReader(files, state, [name for name in held if _FILE.fullmatch(name)])
        metadata = [name for name in held if name.endswith(".metadata")]
        by_state[state] = reader.tensors(metadata)
        used += [f"{state}/{name}" for name in (*reader.arrays, *metadata)]
    gathering.names.update(_owner(state, key) for state, tensors in by_state.items() for key in tensors)
    for state, tensors in by_state.items():
        if state == "optimizer_state":
            _optimizer(gathering, tensors)
            continue
        for key, tensor in tensors.items():
            owner = _owner(state, key)
            gathering.weight(renamed(tensor, GROUPS[state], key if options.as_is else owner), owner)
    if "ema_state" in files_by_state:
        gathering.notes.append("group ema is Paddle's average as stored: it starts at zero, without bias correction")
    others = [f"{state}/{name}" for state, held in files_by_state.items() for name in held]
    return gathering.listing(NAME, [*(name for name in names if name not in files_by_state), *others], used)


def _owner(state: str, key: str) -> str:
    if state == "optimizer_state":
        return key.rpartition(".")[0]
    return key.removesuffix(_MASTER) if state in ("master_weight", "ema_state") else key


def _optimizer(gathering: Gathering, tensors: Mapping[str, ForeignTensor]) -> None:
    types: dict[str, dict[str, ForeignTensor]] = defaultdict(dict)
    for key, tensor in tensors.items():
        owner, _, kind = key.rpartition(".")
        types[owner][kind] = tensor
    for owner, held in types.items():
        if not gathering.options.as_is:
            powers = [held.pop(kind) for kind in progress.POWERS if kind in held]
            gathering.powers(_array(piece, one) for one in powers for piece in (*one.pieces, *one.copies))
        if held:
            gathering.moments(owner, held)


def _array(piece: ForeignPiece, tensor: ForeignTensor) -> LocalTensorParts:
    spec = tensor.spec
    return of_arrays([StoredArray(piece.file, spec.name, spec.dtype, piece.box.shape, piece.start, piece.strides)])


class DescribedShard(NamedTuple):
    """A shard in the metadata: its box of the whole, or a flat range of that box."""

    dtype: str
    box: Box
    shape: Shape | None
    flat: tuple[int, int] | None


class StateReader:
    """Reads one of the directories, such as `optimizer_state`. `arrays` are those of each file by key."""

    def __init__(self, files: Files, state: str, names: Sequence[str]) -> None:
        self._files, self._state = files, state
        self.arrays: dict[str, dict[str, LocalTensorParts]] = {}
        for name in names:
            saved = read_dict(files, f"{state}/{name}")
            refuse_rest(f"{state}/{name}", saved.rest)
            self.arrays[name] = dict(saved.tensors)

    def tensors(self, metadata: Sequence[str]) -> dict[str, ForeignTensor]:
        """The whole tensors by key. `StateMismatch` if files and metadata contradict each other."""
        if not metadata:
            path = f"{self._state}/0.metadata"
            raise CorruptManifest(f"{path} is missing, which locates the shards", file=path)
        pieces: dict[str, list[ForeignPiece]] = defaultdict(list)
        copies: dict[str, list[ForeignPiece]] = defaultdict(list)
        specs: dict[str, TensorSpec] = {}
        for path in metadata:
            places: dict[str, set[tuple[Box, tuple[int, int] | None]]] = defaultdict(set)
            for key, shard, name in self._placed(path):
                spec = TensorSpec(GROUPS[self._state], key, shard.dtype, shard.shape or ())
                if specs.setdefault(key, spec) != spec:
                    raise self._odd(path, key, f"has two shapes, {list(spec.shape)} and {list(specs[key].shape)}")
                check_box(shard.box, spec.shape, key)
                again = (shard.box, shard.flat) in places[key]
                places[key].add((shard.box, shard.flat))
                (copies if again else pieces)[key] += self._pieces(path, key, shard, name)
        for name, left in self.arrays.items():
            if left:
                raise StateMismatch(
                    f"{self._state}/{name} has {next(iter(left))!r}, which {self._state}/{metadata[0]} does not describe",
                    hint=_STALE,
                    file=f"{self._state}/{name}",
                    tensor=next(iter(left)),
                )
        for key, spec in specs.items():
            boxes = [piece.box for piece in pieces[key]]
            if sum(box.volume for box in boxes) != prod(spec.shape) or first_overlap(boxes) is not None:
                raise self._odd(metadata[0], key, f"has shards that do not tile {list(spec.shape)}")
        return {key: ForeignTensor(spec, tuple(pieces[key]), tuple(copies[key])) for key, spec in specs.items()}

    def _placed(self, path: str) -> Iterator[tuple[str, DescribedShard, str]]:
        """Each shard with its key and file."""
        whole = f"{self._state}/{path}"
        value = read_pickle(self._files, whole, RECORDS)
        stated = value.get("state_dict_metadata") if isinstance(value, PickledRecord) else None
        stored = value.get("storage_metadata") if isinstance(value, PickledRecord) else None
        if not isinstance(stated, dict) or not isinstance(stored, dict):
            raise StateMismatch(f"{whole} is not the metadata of a FlexCheckpoint", file=whole)
        known = {str(key): self._shards(path, str(key), _listed(shards)) for key, shards in stated.items()}
        for index, name in stored.items():
            key = index.get("tensor_key") if isinstance(index, PickledRecord) else None
            if not isinstance(key, str) or key not in known or not isinstance(name, str):
                raise self._odd(path, str(key), f"is in {name!r}, but the metadata does not describe it")
            yield key, self._described(path, key, index, known[key]), name
        listed = {index.get("tensor_key") for index in stored}
        for key in known:
            if key not in listed:
                raise self._odd(path, key, "is in no file")

    def _described(self, path: str, key: str, index: PickledRecord, shards: Sequence[DescribedShard]) -> DescribedShard:
        offset, flat = _numbers(index.get("global_offset")), _numbers(index.get("flattened_range"))
        fitting = [one for one in shards if one.box.offset == offset and (flat is None or one.flat == flat)]
        shape = _numbers(index.get("local_shape"))
        if shape is not None:
            fitting = [one for one in fitting if one.box.shape == shape]
        if len(fitting) != 1:
            raise self._odd(path, key, f"at {offset} {flat or ''} is described {len(fitting)} times")
        return fitting[0]

    def _shards(self, path: str, key: str, records: Sequence[Any]) -> list[DescribedShard]:
        """A tensor's shards. Old metadata lack the whole shape: it ends where the last shard does."""
        shards = [self._shard(path, key, record) for record in records]
        stops = zip(*(one.box.stop for one in shards), strict=True)
        reached = tuple(max(stop) for stop in stops)
        return [one if one.shape is not None else one._replace(shape=reached) for one in shards]

    def _shard(self, path: str, key: str, record: Any) -> DescribedShard:
        if not isinstance(record, PickledRecord):
            raise self._odd(path, key, "is not described by LocalTensorMetadata")
        offset, local = _numbers(record.get("global_offset")), _numbers(record.get("local_shape"))
        dtype = _DTYPES.get(str(record.get("dtype")).removeprefix("paddle."))
        if offset is None or local is None or dtype is None or len(offset) != len(local):
            raise self._odd(
                path, key, f"has invalid metadata: offset {offset}, shape {local}, dtype {record.get('dtype')!r}"
            )
        shape = _numbers(record.get("global_shape"))
        flat = _numbers(record.get("flattened_range")) if record.get("is_flattened") else None
        if flat is not None and (len(flat) != 2 or not 0 <= flat[0] <= flat[1] <= prod(local)):
            raise self._odd(path, key, f"has the invalid flat range {flat} for shape {list(local)}")
        return DescribedShard(dtype, Box(offset, local), shape, None if flat is None else (flat[0], flat[1]))

    def _pieces(self, path: str, key: str, shard: DescribedShard, name: str) -> list[ForeignPiece]:
        if name not in self.arrays:
            file = f"{self._state}/{name}"
            raise CorruptManifest(f"{file} is missing; {self._state}/{path} places {key!r} there", file=file, tensor=key)
        array = self.arrays[name].pop(key, None)
        length = None if shard.flat is None else (shard.flat[1] - shard.flat[0],)
        wanted = length or shard.box.shape
        if array is None or array.dtype != shard.dtype or array.shape != wanted or array.decoder is not None:
            array_text = "nothing" if array is None else f"{array.dtype} of shape {list(array.shape)}"
            raise self._odd(path, key, f"has {array_text} in {name} instead of {shard.dtype} of shape {list(wanted)}")
        if shard.flat is None:
            moved = [shard.box.place(piece.box) for piece in array.pieces]
            return [piece._replace(box=box) for piece, box in zip(array.pieces, moved, strict=True)]
        return [one._replace(box=shard.box.place(one.box)) for one in array.stored().run(0, *shard.flat, shard.box.shape)]

    def _odd(self, path: str, key: str, why: str) -> StateMismatch:
        return StateMismatch(f"{self._state}/{path}: {key!r} {why}", hint=_STALE, file=f"{self._state}/{path}", tensor=key)


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _numbers(value: Any) -> Shape | None:
    """Whole numbers of a list or tuple; None for anything else."""
    plain = isinstance(value, list | tuple) and all(isinstance(n, int) and not isinstance(n, bool) for n in value)
    return tuple(value) if plain else None


KIND = ForeignKind(NAME, IMPORT_KINDS[NAME], recognises, read)
