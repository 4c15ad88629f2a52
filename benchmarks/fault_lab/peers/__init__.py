"""Who is put to the test, and the few verbs by which a trainer saves and a new process resumes.

A peer's module is imported in that peer's own environment only.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, Protocol

from benchmarks.state import State

DAEMON, AGENT = "daemon", "agent"


class Peer(Protocol):
    """A checkpointer as one trainer uses it, alone."""

    def save(self, step: int) -> None:
        """Returns when the trainer may compute on."""

    def wait(self) -> None:
        """Returns when the peer says that the last save is complete; raises if it failed."""

    def close(self) -> None:
        """The end of a trainer that is not killed."""

    def resume(self) -> int:
        """Load the newest checkpoint in the way that the peer documents, and return its step; 0 where there is none."""

    def load(self, step: int) -> None:
        """Load this step, as somebody would by hand."""


class Spec(NamedTuple):
    """What the lab must know of a peer before it runs it. Files are named from the directory that the peer saves to."""

    name: str
    module: str  # in this package
    title: str
    files: str  # the checkpoint of a step: a file, or a directory
    distributions: tuple[str, ...]  # whose versions are printed
    variant: str = ""
    requires: tuple[str, ...] = ()  # what pip installs into its environment
    environment: str = ""  # whose environment it is, where several share one; "" is the project's own
    helper: str = ""  # what lives on when a trainer is killed
    tracker: str = ""  # a file that says which checkpoint is the newest
    overwrites: bool = False  # a new checkpoint takes the place of the one before


_HOLDFAST_FILES = "bench/checkpoints/step-{step:08d}"

PEERS: Mapping[str, Spec] = {
    spec.name: spec
    for spec in (
        Spec("holdfast", "holdfast", "Holdfast, `save()`", _HOLDFAST_FILES, ("holdfast-checkpoint",), helper=DAEMON),
        Spec(
            "holdfast-staged",
            "holdfast",
            'Holdfast, `wait="staged"`',
            _HOLDFAST_FILES,
            ("holdfast-checkpoint",),
            "staged",
            helper=DAEMON,
        ),
        Spec("torch-save", "plain_files", "`torch.save`, one file", "checkpoint.pt", ("torch",), "one", overwrites=True),
        Spec("torch-save-steps", "plain_files", "`torch.save`, a file a step", "checkpoint-{step}.pt", ("torch",), "steps"),
        Spec(
            "safetensors",
            "plain_files",
            "safetensors, a file a step",
            "checkpoint-{step}.safetensors",
            ("safetensors",),
            "safetensors",
        ),
        Spec("dcp", "dcp", "DCP `save`", "step-{step}", ("torch",), "sync"),
        Spec("dcp-async", "dcp", "DCP `async_save`", "step-{step}", ("torch",), "async"),
        Spec(
            "dlrover",
            "dlrover_flash",
            "DLRover flash checkpoint",
            "{step}",
            ("dlrover",),
            requires=("dlrover==0.6.1", "grpcio", "protobuf"),  # it imports what it does not ask for
            environment="dlrover",
            helper=AGENT,
            tracker="dlrover_latest.txt",
        ),
        Spec(
            "orbax",
            "orbax_manager",
            "Orbax `CheckpointManager`",
            "{step}",
            ("orbax-checkpoint", "jax"),
            requires=("orbax-checkpoint==0.12.4", "jax==0.10.2"),
            environment="orbax",
        ),
        Spec(
            "paddle-holdfast",
            "paddle_trainers",
            "Holdfast, `integrations.paddle`",
            "run/checkpoints/step-{step:08d}",
            ("holdfast-checkpoint",),
            "holdfast",
        ),
        Spec(
            "paddle-unified",
            "paddle_trainers",
            "PaddleFormers, `unified_checkpoint`",
            "checkpoint-{step}",
            ("paddlepaddle", "paddleformers"),
            "unified_checkpoint",
        ),
        Spec(
            "paddle-flex",
            "paddle_trainers",
            "PaddleFormers, `flex_checkpoint`",
            "checkpoint-{step}",
            ("paddlepaddle", "paddleformers"),
            "flex_checkpoint",
        ),
    )
}
# Run by name, and by the Python of an environment that has Paddle: Paddle's numpy is older than the project's.
PADDLE = ("paddle-holdfast", "paddle-unified", "paddle-flex")


def open_peer(spec: Spec, directory: Path, state: State) -> Peer:
    """The peer over live tensors, which it saves and loads into."""
    peer: Peer = import_module(f".{spec.module}", __name__).open_peer(directory, state, spec.variant)
    return peer
