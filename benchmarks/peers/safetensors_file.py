"""safetensors' save_file of each rank's tensors, synced; blocks. Resharding is slicing by hand."""

from __future__ import annotations

import shutil

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks.state import State

from . import Place
from .torch_save import file_of, sync_file


class SafetensorsFile:
    def __init__(self, place: Place, state: State) -> None:
        self._place, self._state = place, state

    def save(self, step: int) -> None:
        path = file_of(self._place, step, self._state.rank, "safetensors")
        path.parent.mkdir(exist_ok=True)
        save_file(self._state.tensors, path)
        sync_file(path)

    def fence(self) -> None:
        """Nothing is read after save() has returned."""

    def wait(self) -> None:
        """It was complete when save() returned."""

    def clear(self, step: int) -> None:
        shutil.rmtree(self._place.directory / f"step-{step}")


def open_peer(place: Place, state: State, variant: str) -> SafetensorsFile:
    return SafetensorsFile(place, state)


def load_and_copy(place: Place, state: State, step: int) -> None:
    found = load_file(file_of(place, step, state.rank, "safetensors"))
    for name, tensor in state.tensors.items():
        tensor.copy_(found[name])


def load_opened(place: Place, state: State, step: int) -> None:
    with safe_open(file_of(place, step, state.rank, "safetensors"), framework="pt") as file:
        for name, tensor in state.tensors.items():
            tensor.copy_(file.get_tensor(name))


def load_slices(place: Place, state: State, step: int) -> None:
    """Each saved file's rows that this rank holds now."""
    for saved_rank in range(place.saved_world):
        with safe_open(file_of(place, step, saved_rank, "safetensors"), framework="pt") as file:
            for name, tensor in state.tensors.items():
                rows = file.get_slice(name)
                held = rows.get_shape()[0]
                first = state.rank * len(tensor) - saved_rank * held  # of this rank, counted in the file's rows
                start, stop = max(first, 0), min(first + len(tensor), held)
                if start < stop:
                    tensor[start - first : stop - first].copy_(rows[start:stop])


LOADERS = {"safetensors load_file + copy": load_and_copy, "safetensors safe_open": load_opened}
RESHARDERS = {"safetensors, sliced by hand": load_slices}
