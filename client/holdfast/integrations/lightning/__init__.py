"""Saves and resumes a Lightning Trainer with Holdfast: a callback that replaces ModelCheckpoint, and a CheckpointIO."""

from holdfast.integrations.lightning.callback import HoldfastCheckpoint
from holdfast.integrations.lightning.checkpoint_io import HoldfastCheckpointIO
from holdfast.integrations.lightning.contents import load_from_checkpoint

__all__ = ["HoldfastCheckpoint", "HoldfastCheckpointIO", "load_from_checkpoint"]
