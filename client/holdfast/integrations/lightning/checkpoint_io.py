"""A CheckpointIO for Fabric, and for Trainers whose ModelCheckpoint stays: what it is given becomes a checkpoint.

    fabric = Fabric(plugins=[HoldfastCheckpointIO("llama3-8b", at="/fast/checkpoints")])
    fabric.save("outputs/step-500.ckpt", {"model": model, "optimizer": optimizer, "step": 500})

It is asked on rank 0 alone, with everything in one dictionary, so it fits strategies that hold the whole state on each rank.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from holdfast.checkpoint import open as open_checkpoint
from holdfast.checkpointer import Checkpointer
from holdfast.integrations.lightning import contents, framework
from holdfast.state.modules import is_tensors
from holdfast.tickets import SaveTicket, settle
from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from holdfast.checkpointer_options import Options

_CheckpointIO: Any = framework.fabric("plugins.io.checkpoint_io").CheckpointIO
_DOCUMENT = "checkpoint"  # in the group `extra`
_MODEL = ("state_dict", "model")  # keys whose tensors are the model's: Lightning's, and what Fabric's users write
_STEP = ("global_step", "step", "iteration", "iter_num")
_NUMBER = re.compile(r"(\d+)(?=\D*$)")


class HoldfastCheckpointIO(_CheckpointIO):
    """Saves to and loads from a run. `path` becomes a link to the checkpoint, where the daemon is on this machine."""

    def __init__(self, run: str, **options: Unpack[Options]) -> None:
        """`options` are those of `Checkpointer`; `policy` is "wait" unless it says otherwise."""
        self._run, self._options = naming.check_run(run), options
        self._options.setdefault("policy", "wait")
        self._checkpointer: Checkpointer | None = None
        self._ticket: SaveTicket | None = None
        self._state: dict[str, Any] = {}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None) -> None:
        """Save the dictionary, and return when everything in it is copied.

        The step is `checkpoint["global_step"]`, "step", "iteration" or "iter_num", else the last number in the name of the
        path. A step that was saved before is replaced. Raises `InvalidRequest` for a dictionary without a step, and with the
        path of a value that is neither tensor nor JSON.
        """
        if storage_options is not None:
            raise InvalidRequest("storage_options mean nothing to Holdfast", hint="leave them out")
        step = _step(checkpoint, path)
        model = next((name for name in _MODEL if is_tensors(checkpoint.get(name))), None)
        rest = {name: value for name, value in checkpoint.items() if name != model}
        self._state.clear()
        if model is not None:
            self._state["model"] = dict(checkpoint[model])
        self._state[_DOCUMENT] = _Given({"model": model, "rest": rest})
        if self._checkpointer is None:
            self._checkpointer = Checkpointer.alone(self._run, self._state, **self._options)
        if self._ticket is not None and self._ticket.step == step:  # under another name
            settle(self._ticket)
        self._ticket = self._checkpointer.save(step, wait="staged", existing="replace")
        if not str(self._options.get("at") or "").startswith(("http://", "https://")):
            self._checkpointer.link(self._ticket, path)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The dictionary that was saved, with tensors on the CPU or where `map_location`, a device, says.

        Files that Lightning itself has written are loaded by Lightning. Waits for a save that this process has begun.
        """
        if self._checkpointer is not None and naming.linked_step(self._run, os.path.realpath(path)) is not None:
            self.teardown()
        if not contents.is_checkpoint(path):
            own = framework.fabric("plugins.io.torch_io").TorchCheckpointIO()
            known = {} if map_location is None else {"map_location": map_location}
            found: dict[str, Any] = own.load_checkpoint(path, weights_only=weights_only, **known)
            return found
        with open_checkpoint(os.path.realpath(path)) as checkpoint:
            try:
                document = contents.document(checkpoint, _DOCUMENT)
            except InvalidRequest:  # one of HoldfastCheckpoint's
                return contents.lightning_dictionary(checkpoint)
            loaded = dict(document["rest"])
            if document["model"] is not None:
                loaded[document["model"]] = contents.weights(checkpoint, ("model",))
        return loaded if map_location is None else _moved(loaded, torch.device(map_location))

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the name; retention removes checkpoints that have none."""
        if os.path.islink(path) and naming.linked_step(self._run, os.readlink(path)) is not None:
            Path(path).unlink(missing_ok=True)
        else:
            framework.fabric("plugins.io.torch_io").TorchCheckpointIO().remove_checkpoint(path)

    def teardown(self) -> None:
        """See every save through. Raises the error of one that failed and that nobody was told of."""
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close()


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
        found = checkpoint.get(name)
        if isinstance(found, int) and not isinstance(found, bool):
            return naming.check_step(found)
    number = _NUMBER.search(Path(path).stem)
    if number is None:
        raise InvalidRequest(
            f"neither the dictionary nor the name {Path(path).name} says which step this is",
            hint='put "global_step" into the dictionary, or the number into the name: step-500.ckpt',
        )
    return naming.check_step(int(number[1]))


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) in (list, tuple):
        return type(value)(_moved(item, device) for item in value)
    return {key: _moved(item, device) for key, item in value.items()} if type(value) is dict else value
