"""A CheckpointIO for Fabric, and for Trainers whose ModelCheckpoint stays: what it is given becomes a checkpoint.

    fabric = Fabric(plugins=[HoldfastCheckpointIO("llama3-8b", at="/fast/checkpoints")])
    fabric.save("outputs/step-500.ckpt", {"model": model, "optimizer": optimizer, "step": 500})

It is asked on rank 0 alone, with everything in one dictionary, so it fits strategies that hold the whole state on each rank.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from holdfast.checkpointer import Checkpointer
from holdfast.checkpointer_options import Options
from holdfast.integrations.lightning import configs, contents, framework
from holdfast.link.checkpoint_links import unlink
from holdfast.state.modules import is_tensors
from holdfast.state.named_entries import NamedEntry
from holdfast.tickets import SaveTicket
from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.staging.messages import Policy

_CheckpointIO: Any = framework.fabric("plugins.io.checkpoint_io").CheckpointIO
_MODEL = ("state_dict", "model")  # keys of the model's tensors: Lightning's, and the usual ones of Fabric's users
_STEP = ("global_step", "step", "iteration", "iter_num")
_NAMED = r"(?:^|[^a-z]){}[-_= ]?(\d+)"  # a number that a path's name calls so
_NUMBERED = tuple(re.compile(_NAMED.format(name), re.IGNORECASE) for name in ("global_step", "step", "iter(?:ation)?"))
_EPOCH = re.compile(_NAMED.format("epoch"), re.IGNORECASE)


class HoldfastCheckpointIO(_CheckpointIO):
    """Saves to and loads from a run. `path` becomes a link to the checkpoint, where the daemon is on this machine."""

    def __init__(  # noqa: PLR0913 - options of Checkpointer, named, so that LightningCLI finds them
        self,
        run: str,
        *,
        at: str | os.PathLike[str] | None = None,
        assets: Any = None,
        keep_last: int | None = None,
        slots: int | None = None,
        policy: Policy = "wait",
        file_bytes_max: int | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        """The options are those of `Checkpointer`, and None is its default; `policy` is "wait" unless it says otherwise."""
        given = contents.given(
            at=at, assets=assets, keep_last=keep_last, slots=slots, file_bytes_max=file_bytes_max, info=info
        )
        self._begin(naming.check_run(run), {**given, "policy": policy})

    def _begin(self, run: str, options: Options) -> None:
        self._run, self._options = run, options
        self._checkpointer: Checkpointer | None = None
        self._state: dict[str, Any] = {}
        self._saved: _Saved | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy, also in another process, saves into the same run on its own connection."""
        return {"run": self._run, "options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin(state["run"], state["options"])

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None) -> None:
        """Save the dictionary, and return when it is committed, so that the path exists for all later calls.

        The step is `checkpoint["global_step"]`, "step", "iteration" or "iter_num"; else the number that the name of the path
        calls step or iter; else the epoch, of the dictionary or the name; else the only number in the name. The same path
        again replaces what it held. Another path for a step is another name of the same tensors, and with fewer of them a
        name of them all. Raises `InvalidRequest` for other tensors under another path, for a dictionary without a step, and
        with the path of a value that is neither tensor nor JSON.
        """
        if storage_options is not None:
            raise InvalidRequest("Holdfast does not support storage_options", hint="leave them out")
        step = _step(checkpoint, path)
        model = next((name for name in _MODEL if is_tensors(checkpoint.get(name))), None)
        plain = configs.stored(checkpoint)
        rest = {name: value for name, value in plain.items() if name != model}
        tensors = dict(_tensors(plain))
        if self._saved is not None and self._saved.step == step and self._saved.path != os.path.abspath(path):
            self._check_same(tensors, self._saved)
            if tensors.keys() < self._saved.tensors.keys():
                self._link(step, path)
                return
        self._state.clear()
        if model is not None:
            self._state["model"] = NamedEntry(checkpoint[model])
        self._state[contents.PLUGIN_KEY] = _Given({"model": model, "rest": rest})
        ticket = self._connected().save(step, wait="staged", existing="replace")
        self._link(ticket, path)  # before the commit: retention leaves what has a name
        ticket.result()
        self._saved = _Saved(step, os.path.abspath(path), {name: _place(tensor) for name, tensor in tensors.items()})

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The dictionary that was saved, with tensors on the CPU or on the device `map_location`.

        Files that Lightning itself has written are loaded by Lightning.
        """
        if not contents.is_checkpoint(path):
            own = framework.fabric("plugins.io.torch_io").TorchCheckpointIO()
            known = {} if map_location is None else {"map_location": map_location}
            checkpoint: dict[str, Any] = own.load_checkpoint(path, weights_only=weights_only, **known)
            return checkpoint
        loaded = contents.stored_dictionary(path)
        return loaded if map_location is None else _moved(loaded, torch.device(map_location))

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the name; retention removes checkpoints without a name."""
        if os.path.islink(path) and naming.linked_step(self._run, os.readlink(path)) is not None:
            unlink([Path(path)])
        else:
            framework.fabric("plugins.io.torch_io").TorchCheckpointIO().remove_checkpoint(path)

    def teardown(self) -> None:
        """Disconnect from the daemon."""
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close()

    def _link(self, of: SaveTicket | int, path: str | os.PathLike[str]) -> None:
        if not str(self._options.get("at") or "").startswith(("http://", "https://")):
            self._connected().link(of, path, required=False)

    def _connected(self) -> Checkpointer:
        if self._checkpointer is None:
            self._checkpointer = Checkpointer.alone(self._run, self._state, **self._options)
        return self._checkpointer

    def _check_same(self, tensors: dict[str, torch.Tensor], saved: _Saved) -> None:
        """`InvalidRequest` unless the common tensors are equal, and one dictionary contains the other."""
        same = tensors.keys() <= saved.tensors.keys() or tensors.keys() >= saved.tensors.keys()
        both = [name for name in tensors if name in saved.tensors]
        if same and not all(_place(tensors[name]) == saved.tensors[name] for name in both):  # copies, perhaps
            held = dict(_tensors(configs.stored(self.load_checkpoint(saved.path)))) if os.path.lexists(saved.path) else {}
            same = all(name in held and _equal(tensors[name], held[name]) for name in both)
        if not same:
            raise InvalidRequest(
                f"step {saved.step} was already saved as {saved.path} with other tensors, and a run has only one "
                "checkpoint per step",
                hint="put both into one dictionary, or give each file its own run",
            )


class _Place(NamedTuple):
    """A tensor's memory and version. The weak reference detects reuse of the memory."""

    storage: Any  # StorageWeakRef, which has no types
    version: int
    offset: int
    shape: tuple[int, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Place) and self[:] == other[:] and not self.storage.expired()

    def __hash__(self) -> int:
        return hash(self[1:])


class _Saved(NamedTuple):
    step: int
    path: str
    tensors: dict[str, _Place]  # by path in the dictionary


def _place(tensor: torch.Tensor) -> _Place:
    version = 0 if tensor.is_inference() else tensor._version
    weak: Any = StorageWeakRef
    return _Place(weak(tensor.untyped_storage()), version, int(tensor.storage_offset()), tuple(tensor.shape))


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(tensor.detach().cpu().reshape(-1).view(torch.uint8) for tensor in (one, other)))


def _tensors(value: Any, at: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield at, value
    elif isinstance(value, (Mapping, list, tuple)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors(item, f"{at}/{key}")


class _Given:
    """A dictionary to be stored, as an entry of the state."""

    def __init__(self, value: dict[str, Any]) -> None:
        self._value = value

    def state_dict(self) -> dict[str, Any]:
        return self._value

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._value = state


def _step(checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> int:
    for name in _STEP:
        value = checkpoint.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return naming.check_step(value)
    name = Path(path).stem
    for pattern in _NUMBERED:
        if number := pattern.search(name):
            return naming.check_step(int(number[1]))
    epoch = checkpoint.get("epoch")
    if isinstance(epoch, int) and not isinstance(epoch, bool):
        return naming.check_step(epoch)
    numbers = [value[1] for value in [_EPOCH.search(name)] if value] or re.findall(r"\d+", name)
    if len(numbers) != 1:
        raise InvalidRequest(
            f"neither the dictionary nor the file name {Path(path).name} contains the step",
            hint='put "global_step" into the dictionary, or the number into the file name: step-500.ckpt',
        )
    return naming.check_step(int(numbers[0]))


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) in (list, tuple):
        return type(value)(_moved(item, device) for item in value)
    return {key: _moved(item, device) for key, item in value.items()} if type(value) is dict else value
