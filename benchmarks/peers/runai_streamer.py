"""runai-model-streamer: a loader of safetensors files with 16 readers."""

from __future__ import annotations

from runai_model_streamer import SafetensorsStreamer

from benchmarks.state import State

from . import Place
from .safetensors_file import SafetensorsFile
from .torch_save import file_of


def open_peer(place: Place, state: State, variant: str) -> SafetensorsFile:
    return SafetensorsFile(place, state)


def load(place: Place, state: State, step: int) -> None:
    """Its number of readers is RUNAI_STREAMER_CONCURRENCY, which is 16 unless told otherwise."""
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(file_of(place, step, state.rank, "safetensors")))
        for name, tensor in streamer.get_tensors():
            state.tensors[name].copy_(tensor)


LOADERS = {"runai-model-streamer": load}
