"""Holdfast, through its public API: the daemon was started by `holdfast serve`, as teams do."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

from safetensors import safe_open

from benchmarks.state import State
from holdfast import Api, Checkpointer
from holdfast.rest import retention

from . import Peer, Place
from .shards import as_global

RUN = "bench"
IN_EXTRA = ("exp_avg", "exp_avg_sq")  # mappings that have no group of their own
GROUPS = ("model", "master", "extra")  # all of them
VERIFY_WAIT_S, POLL_S = 120.0, 0.02


def entries(state: State) -> dict[str, dict[str, Any]]:
    """The state as a trainer hands it over: weights, masters and moments, each a mapping of tensors."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, tensor in as_global(state).items():
        entry, _, rest = name.partition("/")
        found[entry][rest] = tensor
    return dict(found)


class Holdfast:
    def __init__(self, place: Place, state: State, variant: str) -> None:
        self.place = place
        self._staged = variant == "staged"
        # Trainers do this while they set up their model; here nothing else takes that time.
        self.checkpointer = Checkpointer(RUN, entries(state), at=place.directory, fenced=True)
        self.checkpointer.prepare(wait=True)
        self._ticket: Any = None

    def save(self, step: int) -> None:
        self._ticket = self.checkpointer.save(step, wait="staged" if self._staged else None)

    def fence(self) -> None:
        self.checkpointer.fence()

    def wait(self) -> None:
        self._ticket.result()

    def clear(self, step: int) -> None:
        """Once it is verified: the daemon reads every checkpoint back, and must not do so while the next is timed."""
        assert self.place.url is not None
        with Api(self.place.url) as api:
            limit = time.monotonic() + VERIFY_WAIT_S
            while not api.checkpoint(RUN, step).verified and time.monotonic() < limit:
                time.sleep(POLL_S)
            retention.remove(api, RUN, step, force="newest-verified")  # as for everybody, before the next save


def open_peer(place: Place, state: State, variant: str) -> Holdfast:
    return Holdfast(place, state, variant)


def load(place: Place, state: State, step: int) -> None:
    """With no daemon running: from the directory, digests checked. Groups are named, because `restore()` of everything would
    start a daemon behind the next load and touch memory for saves."""
    Checkpointer(RUN, entries(state), at=place.directory).restore(step, groups=GROUPS)


def load_held(peer: Peer, state: State) -> None:
    """As a restarted trainer does: the slot is still there."""
    assert isinstance(peer, Holdfast)
    with Checkpointer(RUN, entries(state), at=peer.place.directory) as checkpointer:
        checkpointer.restore()


def check(place: Place, state: State, step: int) -> None:
    """What stands on the disk, read by safetensors and not by Holdfast."""
    directory = place.directory / RUN / "checkpoints" / f"step-{step:08d}"
    for path in sorted(directory.glob("*.safetensors")):
        group = path.name.split(".")[0].split("-")[0]
        with safe_open(path, framework="pt") as file:
            for stored in file.keys():  # noqa: SIM118 - it is no mapping
                name = stored if group == "extra" else f"{group}/{stored}"
                tensor = state.tensors.get(name)
                if tensor is not None:
                    first = state.rank * len(tensor)
                    tensor.copy_(file.get_slice(stored)[first : first + len(tensor)])


LOADERS = {"Holdfast restore, digests checked": load}
RESHARDERS = LOADERS
