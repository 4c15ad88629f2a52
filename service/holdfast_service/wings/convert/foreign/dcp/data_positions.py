"""Positions of torchtitan's data loaders: pickles in a value `dataloader`, one for each data-parallel rank, become values
under the keys of `holdfast.integrations.torchtitan`, from which training goes on.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any

from holdfast_formats.errors import Refused
from holdfast_service.storage import MemoryTier
from holdfast_service.wings.convert.foreign import pickles
from holdfast_service.wings.convert.foreign.dcp.gathering import GatheredListing, Unread, ValuePlace

KEY = "dataloader"
_RANK, _WORLD = re.compile(r"dp_rank_(\d+)"), "world_size"


def add(gathered: GatheredListing, group: str) -> None:
    """Store the positions besides the value, which other programs of torchtitan read. A note for those that are not plain."""
    saved = gathered.documents.get(group, {}).get(KEY)
    world = saved.get(_WORLD) if isinstance(saved, dict) else None
    for name, value in _pickled(saved).items() if type(world) is int else ():
        file, files = f"{KEY}.{name}", MemoryTier()
        files.put(file, value)
        apart = GatheredListing(files)
        try:
            made = apart.json(pickles.read_pickle(files, file), ValuePlace(file, group, KEY))
        except Refused as error:
            made = Unread(error.detail)
        if apart.tensors:
            made = Unread("it has arrays")
        gathered.keep(made, group, f"{KEY}.{int(name[8:])}-of-{world}", f"the position in {file}")


def _pickled(saved: Any) -> Mapping[str, bytes]:
    """The pickles by rank, if a value consists of them."""
    found = {}
    for name, value in saved.items() if isinstance(saved, dict) else ():
        if isinstance(value, dict) and _RANK.fullmatch(name) and value.keys() == {"$bytes"}:
            found[name] = base64.b64decode(value["$bytes"])
    return found
