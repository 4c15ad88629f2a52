"""Checks that a directory is a Hugging Face model and nothing else. Unknown content is refused, and skipped only by choice.

Otherwise an import could commit weights that load wrong, or lose training state: weights transposed for another framework,
optimizer state and masters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from holdfast_formats.errors import StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import FileUse, RefusedPart
from holdfast_service.wings.convert.foreign import directories, file_signs, leaving_out

CONFIG = "config.json"
_FORMATS = (None, "pt")  # what `__metadata__` may say of how the weights lie

# Weights once more, as other programs want them; a reader of the safetensors files needs none of these.
_COPIES = re.compile(
    r"(diffusion_)?pytorch_model(-\d{5}-of-\d{5})?(\.(fp16|bf16|fp32))?(-\d{5}-of-\d{5})?\.bin(\.index(\.(fp16|bf16|fp32))?\.json)?|tf_model\.h5|flax_model.*\.msgpack(\.index\.json)?|consolidated.*\.safetensors"
    r"|.*\.gguf|consolidated.*\.pth",
    re.IGNORECASE,
)
_ARGUMENTS = "training_args.bin"
# What a training left beside its weights, by the names that frameworks give it.
_TRAINING = re.compile(
    r"optim(izer)?[-._].*|optimizer|optimizer_state|master_weights?([-._].*)?|model_state|scheduler\..*|scaler\..*|rng_state.*"
    r"|random_states.*|global_step.*|mp_rank_.*|(bf16_)?zero_pp_rank_.*|iter_\d+|pytorch_model_fsdp.*|.*\.distcp|\.metadata"
    r"|.*\.metadata|.*\.pdopt|.*\.pdparams|trainer_state\.bin|latest|latest_checkpointed_iteration\.txt"
    r"|ema[-._].*",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"-\d{5}-of-(\d{5})\.")
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}\.safetensors")
_ADAPTER = re.compile(r"adapter_model|peft_model|lora_")
_OPAQUE = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".pkl", ".npz", ".safetensors", ".safetensors.index.json")
_ALONE = "to import only the weights, copy them to a separate directory with config.json and the tokenizer"


def weights(names: Iterable[str]) -> list[str]:
    """The safetensors files of the model if there is no index."""
    return [
        name
        for name in names
        if name.lower().endswith(".safetensors") and not _COPIES.fullmatch(name) and not _TRAINING.fullmatch(name)
    ]


class SortedNames(NamedTuple):
    """Files that need no reading, since they have weights for other programs, and files that are refused."""

    copies: tuple[FileUse, ...]
    refused: tuple[RefusedPart, ...]


def sorted_out(names: Iterable[str]) -> SortedNames:
    """The files beside the weights. Those with more of a training, and unknown ones, are refused."""
    copies, refused = [], []
    for name in names:
        if _COPIES.fullmatch(name):
            copies.append(FileUse(name, "unused", directories.NOT_COMPARED))
            continue
        if name == _ARGUMENTS:
            copies.append(FileUse(name, "unused", "a trainer's arguments as Python objects; your trainer has its own"))
            continue
        if _TRAINING.fullmatch(name):
            what = f"{name} is training state, which an import from Hugging Face would drop"
            refused.append(RefusedPart(name, StateMismatch(what, file=name), ""))
        elif name.lower().endswith(_OPAQUE):
            refused.append(RefusedPart(name, StateMismatch(f"unknown file {name}", file=name), ""))
    return SortedNames(tuple(copies), tuple(refused))


def has_all_numbers(source: Files, files: Sequence[str], stem: str, ending: str) -> bool:
    """Whether these are all of the numbered files of a model, but for those that are left out."""
    number = _NUMBER.search(files[0])
    wanted = {f"{stem}-{n:05}-of-{number[1]}{ending}" for n in range(1, int(number[1]) + 1)} if number else set[str]()
    missing = wanted - set(files)
    return wanted >= set(files) and all(leaving_out.hides(source, name) for name in missing)


def check_shards(source: Files, files: Sequence[str]) -> None:
    """`StateMismatch` unless files without an index are one model: a single file, or all of its numbered ones but those that
    are left out.
    """
    for file in files:
        if _ADAPTER.match(file):
            raise StateMismatch(f"{file} is an adapter, not a model", hint="merge it into its base model first", file=file)
    first = _SHARD.fullmatch(files[0])
    if len(files) == 1 and first is None:
        return
    stem = first[1] if first else ""
    if not has_all_numbers(source, files, stem, ".safetensors"):
        if len(files) == 1:
            what = f"{files[0]} is one of several files of a model, but the others are missing"
            raise StateMismatch(what, hint="copy all files of the model, with its index", file=files[0])
        what = f"{files[0]} and {files[1]} may be two models: no index lists both"
        raise StateMismatch(what, hint=_ALONE, file=files[1])


def check_format(file: str, written_format: str | None) -> None:
    """`StateMismatch` for weights in another framework's layout: Paddle, Flax and TensorFlow transpose them."""
    if written_format not in _FORMATS:
        raise StateMismatch(
            f"{file} has format {written_format!r}: its matrices may be transposed",
            hint="save it from PyTorch (format 'pt')",
            file=file,
        )


def read_config(source: Files) -> Mapping[str, Any]:
    """The model's config.json, empty without one; `CorruptManifest` if it cannot be read."""
    return file_signs.read_object(source, CONFIG) if CONFIG in source.list("") else {}
