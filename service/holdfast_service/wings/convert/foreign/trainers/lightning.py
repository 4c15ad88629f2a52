"""What Lightning's `.ckpt` has beside the weights, with the keys of `holdfast.integrations.lightning`.

Loops, callbacks, schedulers and hyper-parameters are one document, from which the adapter resumes as Lightning does from
its own dictionary. Lightning keeps no random states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast_formats.errors import Refused
from holdfast_formats.files import Files
from holdfast_formats.mapping import optimizer_state
from holdfast_formats.mapping.listing import ForeignListing, RefusedPart
from holdfast_service.wings.convert.foreign import json_values, torch_values
from holdfast_service.wings.convert.foreign.dcp.gathering import GatheredListing, Unread, ValuePlace
from holdfast_service.wings.convert.foreign.trainers import numbered_optimizers
from holdfast_service.wings.convert.foreign.trainers.numbered_optimizers import HeldOptimizer

GROUP, KEY = "extra", "lightning"
OPTIMIZERS = "optimizer_states"
_VERSION = "pytorch-lightning_version"
_INSIDE = "holdfast_weights"  # the attribute whose names the group `model` has: the module itself


def is_lightning(beside: Mapping[Any, Any]) -> bool:
    """Whether values beside a state dict are those of a Lightning Trainer."""
    return type(beside.get(_VERSION)) is str and all(type(key) is str for key in beside)


def with_values(files: Files, listing: ForeignListing, beside: Mapping[str, Any], file: str) -> ForeignListing:
    """The listing with the optimizers, and with the document of everything else; what cannot be kept is refused by key."""
    gathered, refused = GatheredListing(files), list(listing.refused)
    gathered.tensors.update(listing.tensors)
    document: dict[str, Any] = {}
    for key, value in beside.items():
        made: Any = len(value) if key == OPTIMIZERS and isinstance(value, list) else Unread("")
        if isinstance(made, Unread):
            made = gathered.json(value, ValuePlace(file, GROUP, f"ranks/00000/{KEY}/{key.replace('/', '|')}"))
        if isinstance(made, Unread):
            why = torch_values.mismatch(file, key, f"has {key!r}, which cannot be kept: {made.reason}")
            refused.append(RefusedPart(key, why))
            continue
        document[key] = made
    states = beside.get(OPTIMIZERS)
    held = [HeldOptimizer(one, file) for one in states] if isinstance(states, list) else []
    before = dict(gathered.tensors)
    try:
        numbered_optimizers.add(gathered, held, tuple(listing.tensors.values()), numbered_optimizers.KEY)
    except Refused as error:
        gathered.take_back(before)
        refused.append(RefusedPart(OPTIMIZERS, error, optimizer_state.GROUP))
        document.pop(OPTIMIZERS, None)
    gathered.document(GROUP, KEY, json_values.ordered({**document, _INSIDE: None}))
    step = beside.get("global_step")
    return listing._replace(
        tensors=gathered.tensors,
        documents=gathered.documents,
        notes=(*listing.notes, *gathered.notes),
        step=step if type(step) is int and step >= 0 else None,
        refused=tuple(refused),
    )
