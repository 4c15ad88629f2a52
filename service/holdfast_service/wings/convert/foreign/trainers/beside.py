"""The files beside the weights in the directories of Trainer and Accelerate: schedulers, scalers, random states."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from holdfast_formats.errors import Refused, StateMismatch
from holdfast_formats.mapping.listing import ForeignListing, RefusedPart
from holdfast_service.wings.convert.foreign import leaving_out, torch_values
from holdfast_service.wings.convert.foreign.dcp.gathering import PLAIN, GatheredListing, Unread, ValuePlace
from holdfast_service.wings.convert.foreign.pickles import read_torch
from holdfast_service.wings.convert.foreign.trainers import random_states
from holdfast_service.wings.convert.foreign.trainers.random_states import SavedStreams

GROUP = "extra"
_NUMBER = re.compile(r"_(\d+)\.")


def keep(gathered: GatheredListing, file: str, key: str) -> None:
    """Store a pickled value as the state of an object with `state_dict`, under a key of group `extra`.

    The file is refused if there are objects in it.
    """
    with refusing(gathered, file):
        held = read_torch(gathered.files, file, PLAIN, opaque=True)
        value = gathered.json(held, ValuePlace(file, GROUP, f"ranks/00000/{key}"))
        if isinstance(value, Unread):
            raise torch_values.mismatch(file, "", f"cannot be kept without running code: {value.reason}")
        gathered.document(GROUP, key, value)


@contextmanager
def refusing(gathered: GatheredListing, *files: str) -> Iterator[None]:
    """Refuse these files, of which nothing is kept then, if something in them cannot be imported."""
    held = dict(gathered.tensors)
    try:
        yield
    except Refused as error:
        gathered.take_back(held)
        gathered.refused.extend(RefusedPart(file, error, "") for file in files)


def numbers(names: Sequence[str]) -> dict[int, str]:
    """Files by the number in their names; one without a number is the first. `StateMismatch` for gaps."""
    by_number = {int(found[1]) if (found := _NUMBER.search(name)) else 0: name for name in names}
    if sorted(by_number) != list(range(len(by_number))) or len(by_number) != len(names):
        raise StateMismatch(
            f"{', '.join(sorted(names)[:4])}: files of other ranks or objects are missing",
            hint=f"copy the directory again, with all of its files; or {leaving_out.way_on(names, weights=True)}",
            file=sorted(names)[-1],
        )
    return dict(sorted(by_number.items()))


def with_random_states(
    listing: ForeignListing, gathered: GatheredListing, files: Mapping[int, str], found: Callable[[Any, str], SavedStreams]
) -> ForeignListing:
    """The listing with everything gathered, and with the random states of each rank in `files`."""
    values: dict[int, dict[str, Any]] = {}
    with refusing(gathered, *files.values()):  # all together: a rank without its own would continue another's
        for rank, file in files.items():
            streams = random_states.read(gathered.files, found(read_torch(gathered.files, file), file), rank, file)
            gathered.tensors.update((tensor.key, tensor) for tensor in streams.tensors)
            values[rank] = {GROUP: {random_states.KEY: streams.value}}
    return listing._replace(
        tensors=gathered.tensors,
        documents=gathered.documents,
        notes=(*listing.notes, *gathered.notes),
        rank_documents=values,
        refused=(*listing.refused, *gathered.refused),
    )


def mapping(value: Any, file: str) -> Mapping[str, Any]:
    """A dict by names; `StateMismatch` for anything else."""
    if not isinstance(value, dict) or not all(type(key) is str for key in value):
        raise torch_values.mismatch(file, "", "does not hold a dict by names")
    return value
