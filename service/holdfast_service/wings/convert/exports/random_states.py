"""The random states of each rank, as a Trainer reads them: `rng_state.pth`, or `rng_state_0.pth` and so on."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from holdfast_formats import naming
from holdfast_formats.disk import state_json
from holdfast_formats.errors import CheckpointError
from holdfast_formats.mapping import reading
from holdfast_formats.mapping.box_moves import MappedTensor, same
from holdfast_formats.mapping.listing import ForeignTensor
from holdfast_formats.mapping.target_files import TargetFile
from holdfast_service.wings.convert.exports.source import ExportSource
from holdfast_service.wings.convert.foreign import json_values, torch_zips

GROUP, KEY = "extra", "rng"
PATHS = (f"{GROUP}/{KEY}",)
_STREAM = re.compile(r"ranks/(\d+)/rng/(python|numpy|torch|cuda\.\d+)")


class StateFiles(NamedTuple):
    files: tuple[TargetFile, ...]
    notes: tuple[str, ...]


def files(source: ExportSource) -> StateFiles:
    """A file for each rank that saved random states, and notes on what is missing."""
    ranks: dict[int, dict[str, ForeignTensor]] = {}
    for name, tensor in source.group(GROUP).items():
        if found := _STREAM.fullmatch(name):
            ranks.setdefault(int(found[1]), {})[found[2]] = tensor
    made: list[TargetFile] = []
    notes: list[str] = []
    for rank, streams in sorted(ranks.items()):
        value = _value(source, rank, streams, alone=len(ranks) == 1)
        if value is None:
            notes.append(f"the random states of rank {rank} are not those that a Trainer keeps, and are left out")
            continue
        made.append(torch_zips.file_of("rng_state.pth" if len(ranks) == 1 else f"rng_state_{rank}.pth", value))
    if not ranks:
        notes.append("there are no random states: a Trainer that resumes keeps those of its process")
    return StateFiles(tuple(made), tuple(notes))


def _value(source: ExportSource, rank: int, streams: dict[str, ForeignTensor], alone: bool) -> dict[str, Any] | None:
    """The value of a rank's file; None if Python's or numpy's states have another form."""
    try:
        beside = json_values.decode(_beside(source, rank), lambda _, name: name)
        python, numpy = beside["python"], beside["numpy"]
        words = tuple(_words(source, streams["python"]))
        position, kept = numpy["state"]["pos"], (numpy["has_gauss"], numpy["gauss"])
        value: dict[str, Any] = {
            "python": (python["version"], words, python["gauss"]),
            # A list, since pickled arrays name a module of numpy that differs between its versions.
            "numpy": (numpy["bit_generator"], _words(source, streams["numpy"]), position, *kept),
            "cpu": same(streams["torch"]),
        }
    except (CheckpointError, KeyError, TypeError):
        return None
    devices: list[MappedTensor] = []
    while f"cuda.{len(devices)}" in streams:
        devices.append(same(streams[f"cuda.{len(devices)}"]))
    if devices:
        value["cuda"] = devices[0] if alone and len(devices) == 1 else devices
    return value if numpy["bit_generator"] == "MT19937" else None


def _beside(source: ExportSource, rank: int) -> Any:
    """What a rank has beside the words of its generators."""
    listing = source.listing
    if rank in listing.rank_documents:
        return listing.rank_documents[rank][GROUP][KEY]
    common = listing.documents.get(GROUP, {}).get(KEY)
    if common is not None:
        return common
    return json.loads(state_json.for_rank(source.files.read(naming.STATE), rank).values[GROUP][KEY])


def _words(source: ExportSource, tensor: ForeignTensor) -> list[int]:
    (count,) = tensor.spec.shape
    found = reading.elements(source.files, source.listing.tensors, same(tensor), 0, count)
    return [int(word) for word in found]
