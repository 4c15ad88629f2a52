"""The sets of safetensors files in a unified checkpoint: of the model, its masters, the optimizer or an adapter.

A set has an index and files `STEM-00001-of-0000N.safetensors`, of which some may not exist; or files of ranks, such as
`optimizer.tp00_pp01.safetensors_shard_0001`, whose keys were split at random.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from holdfast_formats.errors import CorruptManifest, StateMismatch
from holdfast_formats.files import Files
from holdfast_service.wings.convert.foreign import sixteen_bits
from holdfast_service.wings.convert.foreign.paddle.gathering import CONFIG, read_json
from holdfast_service.wings.convert.foreign.paddle.static_names import every_place
from holdfast_service.wings.convert.foreign.sixteen_bits import StoredDtype
from holdfast_service.wings.convert.foreign.stored_arrays import StoredArray, read_safetensors

_NUMBERED = re.compile(r"-(\d+)-of-(\d+)\.safetensors")
_OF_RANK = re.compile(r"((?:[._](?:tp|pp|shard|sharding|moe|ep)\d+)*)\.safetensors(?:_shard_(\d+))?")
_DEGREE = re.compile(r"(tp|pp|sharding|shard|moe|ep)(\d+)")
_VERSIONS = ("paddleformers_version", "paddlenlp_version")
_OF_PADDLE = re.compile(
    r"(master_weights|optimizer)([-._].*)?\.safetensors(_shard_\d+|\.index\.json)?|\.(model|master|optimizer)_weight\.done\..*"
    r"|saved_signal_.*|(peft_model|lora_model)[-._].*|lora_config\.json|trainer_state\.bin|.*\.pdparams|.*\.pdopt"
)
FORMATS = (None, "pt", "np")
_INCOMPLETE = "copy the whole directory, or import another step"


class FileSet(NamedTuple):
    """A set's index, and the arrays of its files by key, in the order of the files. `ranks` are tensor-parallel ranks by
    file, if the files belong to ranks, and `degree` is their number.
    """

    index_name: str
    stated: Mapping[str, Any]  # the index's own contents
    arrays: Mapping[str, list[StoredArray]]
    formats: Mapping[str, str | None]
    numpy_bits: str | None  # the integers that were taken for bfloat16
    ranks: Mapping[str, int]
    degree: int
    writers: int
    sharded: bool = False  # whether sharding ranks have files of their own

    @property
    def used(self) -> tuple[str, ...]:
        return (*self.formats, *((self.index_name,) if self.stated else ()))

    def said(self, key: str) -> Any:
        """A value of the index, at its top or in its metadata."""
        metadata = self.stated.get("metadata")
        return self.stated.get(key, metadata.get(key) if isinstance(metadata, dict) else None)


def is_of_set(name: str, stem: str) -> bool:
    if not name.startswith(stem):
        return False
    rest = name[len(stem) :]
    return rest == ".safetensors.index.json" or bool(_NUMBERED.fullmatch(rest) or _OF_RANK.fullmatch(rest))


def find_set(files: Files, names: Iterable[str], stem: str, int16: str | None) -> FileSet:
    """The set of this stem; empty if there is none. Raises `CorruptManifest` if index and files disagree, `StateMismatch`
    for 16-bit integers that may be numbers or bfloat16, unless `int16` decides.
    """
    listed = [name for name in names if is_of_set(name, stem)]
    index_name = f"{stem}.safetensors.index.json"
    index = read_json(files, index_name) if index_name in listed else {}
    held = sorted((name for name in listed if name != index_name), key=lambda name: _order(name, stem))
    arrays: dict[str, list[StoredArray]] = defaultdict(list)
    formats: dict[str, str | None] = {}
    for name in held:
        safetensors_file = read_safetensors(files, name)
        if safetensors_file.format not in FORMATS:
            raise StateMismatch(
                f"{name} has format {safetensors_file.format!r}, which does not tell whether its matrices are transposed",
                hint="Paddle writes 'np', or 'pt' for Hugging Face's layout",
                file=name,
            )
        formats[name] = safetensors_file.format
        for array in safetensors_file.arrays:
            arrays[array.key].append(array)
    bits = _bits(files, names, arrays, int16)
    numbers = [match for name in held if (match := _NUMBERED.fullmatch(name[len(stem) :]))]
    ranks: dict[str, int] = {}
    degree, count = 1, max((int(match[2]) for match in numbers), default=0)
    if len(numbers) < len(held) and held != [f"{stem}.safetensors"]:
        if numbers:
            raise StateMismatch(
                f"{held[0]} and {held[-1]} come from different saves: one is merged, the other belongs to a rank",
                hint="remove the files of the other save",
                file=held[-1],
            )
        ranks, degree, count = _ranks(held, stem, index.get("optim_shard_num"))
    sharded = bool(ranks) and any("shard" in name[len(stem) :].partition(".safetensors")[0] for name in held)
    file_set = FileSet(index_name, index, dict(arrays), formats, bits, ranks, degree, count, sharded)
    if index and not ranks:
        _check_index(file_set)
    elif numbers and not index:
        raise CorruptManifest(f"{index_name} is missing, which locates the tensors", hint=_INCOMPLETE, file=index_name)
    return file_set


def is_paddles(files: Files, names: Iterable[str]) -> bool:
    """Whether Paddle wrote a directory, by its config.json, or by files that no other program leaves beside weights."""
    if CONFIG in names and any(key in read_json(files, CONFIG) for key in _VERSIONS):
        return True
    return any(_OF_PADDLE.fullmatch(name) for name in names)


def _bits(files: Files, names: Iterable[str], arrays: dict[str, list[StoredArray]], int16: str | None) -> str | None:
    """The integer dtype that represents bfloat16 in a set, whose arrays become BF16."""
    stored = [StoredDtype(array.key, array.dtype, array.file) for held in arrays.values() for array in held]
    if not any(one.dtype.endswith("16") for one in stored):
        return None
    config = read_json(files, CONFIG) if CONFIG in names else {}
    dtype = sixteen_bits.taken_for_bfloat16(stored, config, int16, of_paddle=is_paddles(files, names))
    if dtype is not None:
        for key, held in arrays.items():
            arrays[key] = [array._replace(dtype="BF16") if array.dtype == dtype else array for array in held]
    return dtype


def _order(name: str, stem: str) -> tuple[int, list[int], str]:
    match = _NUMBERED.fullmatch(name[len(stem) :])
    return (int(match[1]) if match else 0, [int(number) for number in re.findall(r"\d+", name[len(stem) :])], name)


def _ranks(held: Sequence[str], stem: str, shards: Any) -> tuple[dict[str, int], int, int]:
    """The tensor-parallel rank of each file, their number, and that of all ranks, none of which may be missing."""
    ranks: dict[str, int] = {}
    places: dict[tuple[tuple[str, int], ...], set[int]] = defaultdict(set)
    for name in held:
        match = _OF_RANK.fullmatch(name[len(stem) :])
        assert match is not None
        place = tuple((axis, int(number)) for axis, number in _DEGREE.findall(match[1]))
        places[place].add(int(match[2] or 0))
        ranks[name] = dict(place).get("tp", 0)
    first = next(iter(places))
    degrees = [max(dict(place).get(axis, 0) for place in places) + 1 for axis, _ in first]
    for numbered in every_place(degrees):
        named = tuple((axis, number) for (axis, _), number in zip(first, numbered, strict=True))
        missing = _missing(places.get(named, set()), shards if isinstance(shards, int) and shards > 1 else None)
        if missing is not None:
            suffix = "_".join(f"{axis}{number:02d}" for axis, number in named)
            name = f"{stem}.{suffix}.safetensors" + (f"_shard_{missing:04d}" if missing else "")
            raise CorruptManifest(f"{name} is missing", hint=_INCOMPLETE, file=name)
    if len(places) != prod(degrees):
        raise StateMismatch(f"{held[0]} and {held[-1]} do not belong to one set of files", file=held[-1])
    return ranks, max((dict(place).get("tp", 0) for place in places), default=0) + 1, len(places)


def _missing(numbers: set[int], shards: int | None) -> int | None:
    """The first missing number of a rank's files; 0 is a file without a number."""
    if shards is None and numbers == {0}:
        return None
    last = shards or max(numbers, default=0)
    return next((number for number in range(min(last, 1), last + 1) if number not in numbers), None)


def _check_index(held: FileSet) -> None:
    """Check that index and files agree, except for keys that Paddle forgets to list."""
    placed = held.stated.get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
        raise CorruptManifest(f"{held.index_name} has no weight_map of keys and files", file=held.index_name)
    for key, file in placed.items():
        if file not in held.formats:
            raise CorruptManifest(
                f"{file} is missing; {held.index_name} places {key!r} there", hint=_INCOMPLETE, file=file, tensor=key
            )
        if not any(array.file == file for array in held.arrays.get(key, ())) and not _is_packed(held, key):
            raise CorruptManifest(
                f"{file} has no {key!r}, although {held.index_name} places it there", file=file, tensor=key
            )
    for key, arrays in held.arrays.items():
        if key not in placed and "@" not in key:
            raise StateMismatch(
                f"{arrays[0].file} has {key!r}, which {held.index_name} does not list",
                hint="the file may come from another save: copy the directory again",
                file=arrays[0].file,
                tensor=key,
            )


def _is_packed(held: FileSet, key: str) -> bool:
    """Whether this first moment is inside the codes of the second, and so in no file under its own name."""
    owner, _, kind = key.rpartition("/")
    second = held.arrays.get(f"{owner}/moment2_0")
    return kind == "moment1_0" and second is not None and second[0].dtype == "I8"
