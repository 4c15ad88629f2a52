"""Who is compared, what each needs to be installed, and the few verbs that the harness knows them by.

A peer's module is imported in that peer's own environment only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, Protocol

from benchmarks.state import State


class Place(NamedTuple):
    """Where a peer works: its own directory, and for Holdfast the daemon that serves it."""

    directory: Path
    saved_world: int  # by how many ranks what is loaded was saved
    url: str | None = None


class Peer(Protocol):
    """One rank's checkpointer. Every rank calls every verb, in the same order."""

    def save(self, step: int) -> None:
        """Returns when the trainer may compute on."""

    def fence(self) -> None:
        """Returns when the trainer may change its tensors."""

    def wait(self) -> None:
        """Returns when the peer says that the last save is complete on all ranks; raises if it failed."""

    def clear(self, step: int) -> None:
        """Removes a checkpoint; called on rank 0 alone."""


Load = Callable[[Place, State, int], None]


class Spec(NamedTuple):
    """What the harness must know of a peer before it runs it."""

    name: str
    module: str  # in this package, unless it is a dotted path
    title: str
    variant: str = ""
    requires: tuple[str, ...] = ()  # what pip installs into its environment
    environment: str = ""  # whose environment it is, where several share one; "" is the project's own
    saves: bool = True
    loads: bool = True
    reshards: bool = False  # what it saved can be loaded on another number of ranks
    background: bool = False  # save() returns before the checkpoint is complete
    syncs: bool = False  # it syncs what it writes; for the others the harness does, before it calls a save durable
    daemon: bool = False


PEERS: Mapping[str, Spec] = {
    spec.name: spec
    for spec in (
        Spec("holdfast", "holdfast", "Holdfast", reshards=True, background=True, syncs=True, daemon=True),
        Spec(
            "holdfast-staged",
            "holdfast",
            'Holdfast, wait="staged"',
            "staged",
            loads=False,
            background=True,
            syncs=True,
            daemon=True,
        ),
        Spec("torch-save", "torch_save", "torch.save + fsync", syncs=True),
        Spec("safetensors", "safetensors_file", "safetensors + fsync", reshards=True, syncs=True),
        Spec("dcp-sync", "dcp", "DCP save", "sync", reshards=True, syncs=True),
        Spec(
            "dcp-process",
            "dcp",
            "DCP async_save, process, reused stager",
            "process",
            loads=False,
            background=True,
            syncs=True,
        ),
        Spec(
            "torch-checkpointing",
            "torch_checkpointing_manager",
            "torch_checkpointing",
            requires=("torch_checkpointing==0.1.1",),
            environment="torch-checkpointing",
            background=True,
        ),
        Spec(
            "dlrover",
            "dlrover_flash",
            "DLRover flash checkpoint",
            requires=("dlrover==0.6.1", "grpcio", "protobuf"),  # it imports what it does not ask for
            environment="dlrover",
            background=True,
        ),
        Spec(
            "runai",
            "runai_streamer",
            "runai-model-streamer",
            requires=("runai-model-streamer==0.17.0",),
            environment="runai",
            saves=False,
            syncs=True,
        ),
    )
}


def open_peer(spec: Spec, place: Place, state: State) -> Peer:
    """Set up; what that costs is outside of every timed section, as model set-up is."""
    peer: Peer = _module(spec).open_peer(place, state, spec.variant)
    return peer


def loaders(spec: Spec) -> Mapping[str, Load]:
    """By name, the ways in which what this peer saves is loaded on as many ranks as saved it."""
    found: Mapping[str, Load] = _module(spec).LOADERS
    return found


def resharders(spec: Spec) -> Mapping[str, Load]:
    """The ways in which it is loaded on another number of ranks."""
    found: Mapping[str, Load] = _module(spec).RESHARDERS
    return found


def checker(spec: Spec) -> Load:
    """The loader by which the values of a save are checked while the peer is still at work: it reads the disk."""
    check: Load = getattr(_module(spec), "check", None) or next(iter(loaders(spec).values()))
    return check


def holder(spec: Spec) -> Callable[[Peer, State], None] | None:
    """Loads the last save out of the memory in which the peer still holds it; None where it holds none."""
    held: Callable[[Peer, State], None] | None = getattr(_module(spec), "load_held", None)
    return held


def _module(spec: Spec) -> ModuleType:
    return import_module(spec.module if "." in spec.module else f".{spec.module}", __name__)
