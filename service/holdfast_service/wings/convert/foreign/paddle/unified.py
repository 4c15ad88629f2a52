"""Unified checkpoints of PaddleNLP and PaddleFormers: safetensors files of the model, its masters and the optimizer.

The model's files state their layout in the metadata, Hugging Face's or Paddle's; masters and optimizer are always in
Paddle's. An optimizer may be merged, or in parts of ranks (`ignore_merge_optimizer`), or quantised.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from holdfast_formats.errors import CorruptManifest, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import ForeignListing, ForeignTensor, TensorKey
from holdfast_formats.region import Shape
from holdfast_formats.rest.jobs import IMPORT_KINDS, ReadOptions
from holdfast_service.wings.convert.foreign import computed, sixteen_bits
from holdfast_service.wings.convert.foreign.kinds import ForeignKind
from holdfast_service.wings.convert.foreign.paddle import flat, progress, quantised, tensor_parallel, unused_files
from holdfast_service.wings.convert.foreign.paddle.gathering import Gathering
from holdfast_service.wings.convert.foreign.paddle.safetensors_sets import FileSet, find_set, is_of_set, is_paddles
from holdfast_service.wings.convert.foreign.paddle.tensor_parallel import LocalTensorParts
from holdfast_service.wings.convert.foreign.stored_arrays import SafetensorsFile, StoredArray, read_safetensors

NAME = "paddle-uc"
MODEL, MASTERS, OPTIMIZER = "model", "master_weights", "optimizer"
_KINDS = {MODEL: "model", MASTERS: "master", OPTIMIZER: "optimizer"}  # as signals name them
POWER = (1,)  # the shape of a beta power
_STAGES = (None, "O0", "O1", "O2")


def recognises(files: Files) -> bool:
    """An optimizer or masters with a unified checkpoint's names; or a model alone that Hugging Face would not write: in
    Paddle's layout, or in a directory of Paddle with bfloat16 as U16.
    """
    names = files.list("")
    if any(name.startswith(("peft_model", "lora_model")) or name == "lora_config.json" for name in names):
        return False
    if any(is_of_set(name, stem) for name in names for stem in (MASTERS, OPTIMIZER)):
        return True
    held = [name for name in names if is_of_set(name, MODEL) and not name.endswith(".json")]
    if not held:
        return False
    try:
        safetensors_file = read_safetensors(files, held[0])
    except CorruptManifest:
        return False  # the reader of Hugging Face models reports the error
    return safetensors_file.format == "np" or (_has_bits(safetensors_file) and is_paddles(files, names))


def _has_bits(safetensors_file: SafetensorsFile) -> bool:
    return any(array.dtype == "U16" for array in safetensors_file.arrays)


def read(files: Files, options: ReadOptions) -> ForeignListing:
    """The listing of a unified checkpoint; `StateMismatch` and `CorruptManifest` by key and file."""
    names = files.list("")
    sets = {stem: find_set(files, names, stem, options.int16) for stem in _KINDS}
    kinds = [_KINDS[stem] for stem, held in sets.items() if held.arrays]
    unused_files.check_signals(names, max(held.writers for held in sets.values()), kinds)
    reader = UnifiedReader(Gathering(files, options), options)
    reader.read(sets)
    used = sorted({file for held in sets.values() for file in held.used})
    return reader.gathering.listing(NAME, names, used)


class UnifiedReader:
    """Reads sets of files into a gathering: first the model, whose shapes the others need."""

    def __init__(self, gathering: Gathering, options: ReadOptions) -> None:
        self.gathering, self.options = gathering, options

    def read(self, sets: Mapping[str, FileSet]) -> None:
        """Read the three sets of a directory, each of which may be empty."""
        gathering = self.gathering
        gathering.names.update(key for stem in (MODEL, MASTERS) for key in sets[stem].arrays)
        gathering.names.update(key.rpartition("/")[0] for key in sets[OPTIMIZER].arrays)
        for dtype in {held.numpy_bits: None for held in sets.values() if held.numpy_bits}:
            gathering.notes.append(sixteen_bits.note(dtype))
        if self._are_masters(sets):
            self.weights(sets[MODEL], "master")
            self._round_masters()
        else:
            self.weights(sets[MODEL], "model")
        self.weights(sets[MASTERS], "master")
        self.optimizer(sets[OPTIMIZER])

    def _are_masters(self, sets: Mapping[str, FileSet]) -> bool:
        """Whether the model's files hold masters (`skip_save_model_weight`): all F32, in Paddle's layout, of a model with a
        narrower dtype in config.json.
        """
        held = sets[MODEL]
        if not held.arrays or sets[MASTERS].arrays or self.gathering.half is None:
            return False
        wide = all(array.dtype == "F32" for arrays in held.arrays.values() for array in arrays)
        return wide and set(held.formats.values()) == {"np"} and sets[OPTIMIZER].said("master_weights") is not False

    def _round_masters(self) -> None:
        dtype = self.gathering.half
        assert dtype is not None
        for key, tensor in list(self.gathering.tensors.items()):
            rounded = computed.rounded(tensor, TensorKey("model", key.name), dtype)
            self.gathering.tensors[rounded.key] = rounded
        self.gathering.notes.append(
            f"weights are rounded to {dtype} from the master copies in the model's files (skip_save_model_weight)"
        )

    def weights(self, held: FileSet, group: str) -> None:
        """List weights or masters, under their names. Only the model's own files may be in Hugging Face's layout."""
        for key, arrays in held.arrays.items():
            turned = {group == "model" and held.formats[array.file] != "np" for array in arrays}
            if len(turned) > 1:
                raise tensor_parallel.of_arrays(arrays).odd(f"but {arrays[-1].file} has it in another layout")
            plain = turned == {False}
            tensor = self.tensor(held, TensorKey(group, key), arrays, None if group == "model" else self._shape(key))
            shape = tensor.spec.shape if plain else self.gathering.in_paddle(key, tensor.spec.shape)
            if shape is not None:
                self.gathering.shapes.setdefault(key, shape)
            self.gathering.weight(tensor, key, paddle_layout=plain)

    def _shape(self, key: str) -> Shape | None:
        return self.gathering.shapes.get(key)

    def optimizer(self, held: FileSet) -> None:
        """List the moments; beta powers are checked against the number of steps."""
        stage = held.said("ckpt_quant_stage")
        if stage not in _STAGES:
            raise StateMismatch(f"{held.index_name}: unknown quantisation {stage!r}", file=held.index_name)
        types: dict[str, dict[str, list[StoredArray]]] = defaultdict(dict)
        for key, arrays in held.arrays.items():
            owner, _, kind = key.rpartition("/")
            if not owner:
                raise tensor_parallel.of_arrays(arrays).odd("an optimizer key must be a parameter's name, / and a type")
            types[owner][kind] = arrays
        count = 0
        for owner, kinds in types.items():
            powers = {kind: kinds.pop(kind) for kind in progress.POWERS if kind in kinds}
            self._powers(held, owner, powers)
            single = {kind: arrays[0] for kind, arrays in kinds.items()}
            if quantised.is_quantised(single):
                count += 1
                self._decoded(held, owner, kinds)
            elif kinds:
                moments = {
                    kind: self.tensor(held, TensorKey("optim", f"{owner}/{kind}"), arrays, self._shape(owner))
                    for kind, arrays in kinds.items()
                }
                self.gathering.moments(owner, moments)
            else:
                raise tensor_parallel.of_arrays(next(iter(powers.values()))).odd(f"{owner!r} has no moments")
        if count:
            self.gathering.notes.append(
                f"the moments of {count} parameters were decoded from Paddle's quantised form ({stage}); the lost precision "
                "cannot be recovered"
            )

    def _powers(self, held: FileSet, owner: str, powers: Mapping[str, list[StoredArray]]) -> None:
        for kind, arrays in powers.items():
            if self.options.as_is:
                tensor = self.tensor(held, TensorKey("optim", f"{owner}/{kind}"), arrays, POWER)
                self.gathering.weight(tensor, owner)
        if not self.options.as_is:
            self.gathering.powers(tensor_parallel.of_arrays([array]) for arrays in powers.values() for array in arrays)

    def _decoded(self, held: FileSet, owner: str, arrays_by_kind: Mapping[str, list[StoredArray]]) -> None:
        for arrays in arrays_by_kind.values():
            if len(arrays) > 1 or held.ranks:
                raise tensor_parallel.of_arrays(arrays).odd(f"quantised parts of {owner!r} cannot be combined")
        single = {kind: arrays[0] for kind, arrays in arrays_by_kind.items()}
        self.gathering.moments(owner, quantised.decoded(owner, single, self._shape(owner)))

    def tensor(self, held: FileSet, key: TensorKey, arrays: Sequence[StoredArray], shape: Shape | None) -> ForeignTensor:
        """The tensor of a key's arrays. `shape` is the whole one in Paddle's layout, if known."""
        if held.ranks:
            return self._of_ranks(held, key, arrays, shape)
        slices = self.options.assemble_flat and len(arrays) > 1 and shape != POWER  # one may be as long as the whole
        if shape is None or (all(array.shape == shape for array in arrays) and not slices):
            return tensor_parallel.of_arrays(arrays).tensor(*key)
        if not all(len(array.shape) == 1 for array in arrays):
            raise tensor_parallel.of_arrays(arrays).odd(f"the model's weight has shape {list(shape)} in Paddle's layout")
        if not self.options.assemble_flat:
            raise _flat(max([arrays, *self._cut(held)], key=len))
        note = "masters and moments are flat slices (sharding stage 1 v2), joined in the order of the files"
        if note not in self.gathering.notes:
            self.gathering.notes.append(note)
        return flat.assembled(arrays, shape).tensor(*key)

    def _cut(self, held: FileSet) -> list[list[StoredArray]]:
        """Keys in several files, such as a parameter sliced between two ranks."""
        cut_arrays = [arrays for key, arrays in held.arrays.items() if not key.endswith(progress.POWERS)]
        return [arrays for arrays in cut_arrays if len(arrays) > 1]

    def _of_ranks(self, held: FileSet, key: TensorKey, arrays: Sequence[StoredArray], shape: Shape | None) -> ForeignTensor:
        by_rank: dict[int, list[StoredArray]] = defaultdict(list)
        for array in arrays:
            by_rank[held.ranks[array.file]].append(array)
        owner = key.name.rpartition("/")[0] if key.group == "optim" else key.name
        local = None if shape is None else tensor_parallel.local_shape(owner, shape, held.degree)
        parts = {rank: self._of_shards(held, shards, shape, local) for rank, shards in by_rank.items()}
        first = next(iter(parts.values()))
        if shape is None:
            if held.degree > 1 and key.name.rpartition("/")[2] not in progress.POWERS:
                raise first.odd("its whole shape is unknown: the model's files have no weight of this name")
            shape = first.shape
        fused = tensor_parallel.proportions(owner, self.gathering.config)
        return tensor_parallel.joined(parts, held.degree, shape, fused).tensor(*key)

    def _of_shards(
        self, held: FileSet, arrays: Sequence[StoredArray], shape: Shape | None, local: Shape | None
    ) -> LocalTensorParts:
        """A tensor-parallel rank's part: whole with one of its sharding ranks (v1), or in flat slices with all (v2)."""
        vectors = all(len(array.shape) == 1 for array in arrays)
        if shape is None or local is None or not vectors or not held.sharded:
            return tensor_parallel.of_arrays(arrays)
        if len(arrays) == 1 and arrays[0].shape in (shape, local):
            return tensor_parallel.of_arrays(arrays)
        return flat.assembled(arrays, local)


def _flat(arrays: Sequence[StoredArray]) -> StateMismatch:
    files = list(dict.fromkeys(array.file for array in arrays))
    return StateMismatch(
        f"{arrays[0].key!r} is flat, with {' and '.join(f'{array.shape[0]} elements in {array.file}' for array in arrays)}: "
        "Paddle's sharding stage 1 v2 saved slices, which it cannot load itself",
        hint="join them in the order of the files with --assemble-flat",
        file=files[0],
        files=files,
        tensor=arrays[0].key,
    )


KIND = ForeignKind(NAME, IMPORT_KINDS[NAME], recognises, read)
