"""A committed checkpoint as the dictionary that Lightning reads from a .ckpt file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from holdfast.checkpoint import Checkpoint
from holdfast.checkpoint import open as open_checkpoint
from holdfast.checkpointer_options import Options
from holdfast.integrations.lightning import configs, framework
from holdfast.tensors import json_values
from holdfast_formats.disk import state_json
from holdfast_formats.errors import InvalidRequest

KEY = "lightning"  # of HoldfastCheckpoint's document in the group `extra`
PLUGIN_KEY = "checkpoint"  # of HoldfastCheckpointIO's
AVERAGED = "holdfast_averaged"  # in the document: the group `ema` has the weights that Lightning would load
INSIDE = "holdfast_weights"  # in the document: the attribute whose own names the group `model` has
STATE, OPTIMIZERS = "state_dict", "optimizer_states"


class NotGathered(Mapping[str, Any]):
    """Placeholder for tensors that are saved in place. Any access raises `InvalidRequest`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getitem__(self, key: str) -> Any:
        raise self._refusal()

    def __iter__(self) -> Iterator[str]:
        raise self._refusal()

    def __len__(self) -> int:
        raise self._refusal()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._refusal()

    def _refusal(self) -> InvalidRequest:
        return InvalidRequest(
            f"a hook reads checkpoint[{self._name!r}], which Holdfast leaves empty: Holdfast saves and restores "
            "the live tensors, and gathers nothing",
            hint="store the hook's data under its own key",
        )


def given(**options: Any) -> Options:
    """The Checkpointer options that were given, without None."""
    return cast(Options, {name: value for name, value in options.items() if value is not None})


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    return (Path(path) / "COMMIT").is_file() and (Path(path) / "manifest.json").is_file()


def document(checkpoint: Checkpoint, key: str = KEY) -> Any:
    """The value stored under a key, with its tensors, as the first rank had it. `InvalidRequest` if there is none."""
    text = state_json.for_rank(checkpoint.reader.state, 0).values.get("extra", {}).get(key)
    if text is None:
        raise InvalidRequest(
            f"{checkpoint.run}@{checkpoint.step} was not saved by Lightning: it has no value {key!r}",
            hint="restore it with holdfast.Checkpointer, or read its tensors with holdfast.open",
        )

    def fetch(kind: str, name: str) -> Any:
        return checkpoint.read(name, group="extra", framework="torch" if kind == "tensor" else "numpy")

    return configs.shown(json_values.loads(text, key, fetch))


def weights(checkpoint: Checkpoint, groups: tuple[str, ...]) -> dict[str, Any]:
    """The tensors of these groups on the CPU, by name; tied ones share their memory."""
    tensors: dict[str, Any] = {}
    for group in groups:
        for name in checkpoint.tensors.get(group, {}):
            tensors[name] = checkpoint.read(name, group=group, framework="torch")
        for alias, name in checkpoint.manifest.aliases.get(group, {}).items():
            tensors[alias] = tensors[name]
    return tensors


def stored_dictionary(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The dictionary of a checkpoint's directory or link: all of it, as HoldfastCheckpointIO was given it; everything but
    the optimizers, as a .ckpt file would have it, of one that HoldfastCheckpoint saved.

    Raises `InvalidRequest` for checkpoints that neither of them saved.
    """
    with open_checkpoint(os.path.realpath(path)) as checkpoint:
        if PLUGIN_KEY not in state_json.for_rank(checkpoint.reader.state, 0).values.get("extra", {}):
            return lightning_dictionary(checkpoint)
        given = document(checkpoint, PLUGIN_KEY)
        dictionary = dict(given["rest"])
        if given["model"] is not None:
            dictionary[given["model"]] = weights(checkpoint, ("model",))
        return dictionary


def lightning_dictionary(checkpoint: Checkpoint) -> dict[str, Any]:
    """Everything that Lightning's own file would have, but the optimizers."""
    values = dict(document(checkpoint))
    averaged, inside = values.pop(AVERAGED, False), values.pop(INSIDE, None)
    values.pop(OPTIMIZERS, None)
    if averaged:
        state = weights(checkpoint, ("ema",))
        state.pop("n_averaged", None)
    else:
        prefix = f"{inside}." if inside else ""
        state = {prefix + name: value for name, value in weights(checkpoint, ("model",)).items()}
        state |= weights(checkpoint, ("module",))
    return values | {STATE: state}


def load_from_checkpoint(kind: Any, path: str | os.PathLike[str], *, strict: bool | None = None, **hparams: Any) -> Any:
    """Make a LightningModule of this class from a checkpoint's directory or link, as its own `load_from_checkpoint` does
    from a .ckpt file: with the stored hyperparameters, less what `hparams` says otherwise, and the stored weights.

    Files that Lightning wrote go to Lightning. Raises `InvalidRequest` for checkpoints that Lightning did not save.
    """
    if not is_checkpoint(path):
        return kind.load_from_checkpoint(path, strict=strict, **hparams)
    checkpoint = stored_dictionary(path)
    if not isinstance(checkpoint.get(STATE), Mapping):
        raise InvalidRequest(
            f"{path} has no {STATE!r}: it is not a checkpoint of a Trainer",
            hint="load it with fabric.load(), or read its tensors with holdfast.open()",
        )
    saving = framework.part("core.saving")
    if kind.CHECKPOINT_HYPER_PARAMS_KEY in checkpoint:
        checkpoint[kind.CHECKPOINT_HYPER_PARAMS_KEY] = dict(checkpoint[kind.CHECKPOINT_HYPER_PARAMS_KEY])
    checkpoint.setdefault(kind.CHECKPOINT_HYPER_PARAMS_KEY, {}).update(hparams)
    return saving._load_state(kind, checkpoint, strict=strict, **hparams)
