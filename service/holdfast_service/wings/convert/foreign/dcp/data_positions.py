"""Positions of torchtitan's data loaders: pickles in a value `dataloader`, one for each data-parallel rank, become values
under the keys of `holdfast.integrations.torchtitan`, from which training goes on.
"""

from __future__ import annotations

import base64
import re
from typing import Any

from holdfast_formats.errors import CheckpointError
from holdfast_service.wings.convert.foreign import pickles
from holdfast_service.wings.convert.foreign.dcp.gathering import GatheredListing, Unread, ValuePlace

KEY = "dataloader"
_RANK, _WORLD = re.compile(r"dp_rank_(\d{1,9})"), "world_size"


class _Pickle:
    """The only file of a directory: a pickle inside a pickle, whose bytes are nowhere in the source as they are."""

    label = KEY

    def __init__(self, data: bytes) -> None:
        self.data = data

    def size(self, path: str) -> int | None:
        return len(self.data)

    def stamp(self, path: str) -> str:
        return ""

    def list(self, path: str) -> list[str]:
        return []

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return self.data[offset : None if length is None else offset + length]

    def read_into(self, path: str, offset: int, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        part = self.data[offset : offset + view.nbytes]
        view[: len(part)] = part
        return len(part)

    def read_stored(self, path: str, offset: int, buffer: Any) -> int:
        return self.read_into(path, offset, buffer)


def add(gathered: GatheredListing, group: str) -> None:
    """Store the positions besides torchtitan's own value, which exports need; a note for those that are not plain."""
    saved = gathered.documents.get(group, {}).get(KEY)
    world = saved.get(_WORLD) if isinstance(saved, dict) else None
    for name, value in saved.items() if isinstance(saved, dict) and type(world) is int else ():
        rank = _RANK.fullmatch(name)
        if rank is not None and isinstance(value, dict) and value.keys() == {"$bytes"}:
            made = _plain(base64.b64decode(value["$bytes"]), f"{KEY}.{name}")
            gathered.keep(made, group, f"{KEY}.{int(rank[1])}-of-{world}", f"the position in {KEY}.{name}")


def _plain(pickled: bytes, file: str) -> Any:
    """The JSON of a pickle; `Unread` if it is damaged, or has arrays or objects."""
    apart = GatheredListing(_Pickle(pickled))
    try:
        made = apart.json(pickles.read_pickle(apart.files, file), ValuePlace(file, "", KEY))
    except CheckpointError as error:
        return Unread(error.detail)
    return Unread("it has arrays") if apart.tensors else made
