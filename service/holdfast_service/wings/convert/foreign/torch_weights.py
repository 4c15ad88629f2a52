"""Models in torch files: a Hugging Face directory with `pytorch_model.bin`, or one file with a state dict."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from holdfast_formats import naming
from holdfast_formats.errors import StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import FileUse, ForeignListing, ForeignTensor, TensorKey
from holdfast_formats.rest.jobs import IMPORT_KINDS, ReadOptions
from holdfast_service.wings.convert.foreign import (
    hugging_face,
    hugging_face_names,
    leaving_out,
    quantisation,
    torch_training,
    torch_values,
)
from holdfast_service.wings.convert.foreign.dcp.gathering import PLAIN, GatheredListing
from holdfast_service.wings.convert.foreign.hugging_face import TakenTensors
from holdfast_service.wings.convert.foreign.kinds import ForeignKind
from holdfast_service.wings.convert.foreign.pickles import read_torch
from holdfast_service.wings.convert.foreign.pruned_values import PrunedValue
from holdfast_service.wings.convert.foreign.trainers import lightning

GROUP = "model"
EXTRA_GROUP = "extra"
LIGHTNING = "optimizer_states"  # where Lightning keeps its optimizers, in a list
INDEX = "pytorch_model.bin.index.json"
NESTED = ("state_dict", "model_state_dict", "model", "module")  # keys under which programs put the model's
_WEIGHTS = re.compile(r"pytorch_model(-(\d{5})-of-(\d{5}))?\.bin")
_BARE = re.compile(r".+\.(pt|pth|bin|ckpt)", re.IGNORECASE)
_NO_WEIGHTS = {"training_args.bin"}


def recognises_directory(files: Files) -> bool:
    """A Hugging Face directory with torch files, and without the same in safetensors."""
    names = files.list("")
    return any(_WEIGHTS.fullmatch(name) or name == INDEX for name in names) and not hugging_face.recognises(files)


def recognises_file(files: Files) -> bool:
    """A directory with a torch file, and none of those that Hugging Face writes."""
    return bool(_bare(files.list(""))) and not recognises_directory(files) and not hugging_face.recognises(files)


def read_directory(files: Files, options: ReadOptions) -> ForeignListing:
    """Every tensor of the model; an index must agree about those that are not refused.

    Raises `StateMismatch` for anything beyond such a model, and `CorruptManifest` for truncated files.
    """
    names = files.list("")
    index = _weight_map(files) if INDEX in names else None
    weights = sorted(set(index.values())) if index is not None else [name for name in names if _WEIGHTS.fullmatch(name)]
    if index is None:
        _check_numbers(files, weights)
    tensors: dict[TensorKey, ForeignTensor] = {}
    stored: dict[str, str] = {}  # each tensor's file
    others = TakenTensors(())
    for file in weights:
        pruned = PrunedValue(read_torch(files, file, opaque=True), options, file)
        read = torch_values.state_dict(pruned.value, file, GROUP)
        others = TakenTensors((), (), (*others.refused, *read.refused), (*others.left_out, *pruned.left_out))
        for tensor in read.tensors:
            name = tensor.spec.name
            if name in stored:
                raise torch_values.mismatch(file, name, f"has {name!r}, which {stored[name]} has too")
            tensors[tensor.key], stored[name] = tensor, file
    apart = {part.name for part in others.refused}
    differ = [name for name in (index or {}).keys() | stored if (index or stored).get(name) != stored.get(name)]
    differ = [name for name in differ if name not in apart and not leaving_out.matching(options.leave_out, (name,))]
    if differ:
        wrong = min(differ)
        raise torch_values.mismatch(INDEX, wrong, f"and the files disagree about tensor {wrong!r}", "download it again")
    used = [*weights, INDEX] if index is not None else weights
    taken = others._replace(tensors=tuple(tensors.values()))
    return _listing(DIRECTORY_KIND.name, files, taken, used, options)


def read_file(files: Files, options: ReadOptions) -> ForeignListing:
    """The models of a training's file, and what is beside them, as `torch_training` states. Refused is anything else.

    Raises `StateMismatch` without a state dict, or for several files.
    """
    candidates = _bare(files.list(""))
    if not candidates:
        raise StateMismatch(
            "the directory has no file of torch.save (.pt, .pth, .bin or .ckpt)", hint="leave --from out, or check the path"
        )
    if len(candidates) > 1:
        raise StateMismatch(
            f"the directory holds several torch files: {', '.join(candidates[:4])}",
            hint=f"import one of them: `holdfast import SRC/{candidates[0]} RUN@STEP`; or "
            + leaving_out.way_on(candidates[1:], weights=True),
            file=candidates[-1],
        )
    (file,) = candidates
    pruned = PrunedValue(read_torch(files, file, PLAIN, opaque=True), options, file)
    parts = torch_training.parts(pruned.value, file)
    taken = TakenTensors(parts.models.tensors, parts.notes, parts.models.refused, pruned.left_out)
    listing = _listing(FILE_KIND.name, files, taken, [file], options)
    if lightning.is_lightning(parts.beside):
        return lightning.with_values(files, listing, parts.beside, file)
    gathered = GatheredListing(files)
    gathered.tensors.update(listing.tensors)
    step = torch_training.gather(parts.beside, file, taken.tensors, gathered)
    return listing._replace(
        tensors=gathered.tensors,
        documents=gathered.documents,
        notes=(*listing.notes, *gathered.notes),
        step=step,
        refused=(*listing.refused, *gathered.refused),
    )


def _listing(kind: str, files: Files, taken: TakenTensors, used: Sequence[str], options: ReadOptions) -> ForeignListing:
    """The listing, with the use of every file of the directory."""
    uses = [FileUse(file, "tensors") for file in used if file != INDEX]
    if INDEX in used:
        uses.append(FileUse(INDEX, "unused", "it lists the same tensors as the files; the import writes its own index"))
    config = hugging_face_names.read_config(files)
    noted = taken.noting(quantisation.notes(taken.tensors, config, files.list(""), options))
    return hugging_face.listed(kind, files, noted, uses)


def _bare(names: Iterable[str]) -> list[str]:
    """Torch files that may hold more than weights."""
    return [name for name in names if _BARE.fullmatch(name) and name not in _NO_WEIGHTS]


def _check_numbers(files: Files, weights: Sequence[str]) -> None:
    """`StateMismatch` unless files without an index are a single one, or all of the numbered ones but those left out."""
    if len(weights) == 1 and "-of-" not in weights[0]:
        return
    if not hugging_face_names.has_all_numbers(files, weights, "pytorch_model", ".bin"):
        raise torch_values.mismatch(
            weights[-1],
            "",
            f"and {weights[0]} are an incomplete set of weights, and {INDEX} is missing",
            "download them again",
        )


def _weight_map(files: Files) -> dict[str, str]:
    weight_map = hugging_face.read_index(files, INDEX)
    weight_map = {name: file for name, file in weight_map.items() if not leaving_out.hides(files, file)}
    wrong = next((file for file in weight_map.values() if not naming.is_file_name(file) or files.size(file) is None), None)
    if wrong is not None:
        raise torch_values.mismatch(INDEX, "", f"lists {wrong!r}, which is missing", "download it again")
    return weight_map


DIRECTORY_KIND = ForeignKind("hf-bin", IMPORT_KINDS["hf-bin"], recognises_directory, read_directory, last=True)
FILE_KIND = ForeignKind("torch", IMPORT_KINDS["torch"], recognises_file, read_file, last=True)
