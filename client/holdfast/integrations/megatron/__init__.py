"""Megatron: `save_checkpoint` and `load_checkpoint` of Megatron-LM, on Holdfast. Change one import in megatron/training:

    from holdfast.integrations.megatron import load_checkpoint, save_checkpoint

--save and --load are then ROOT/RUN: the directory that the daemon serves, and the run in it. Any tensor, pipeline and data
parallel sizes restore what any others have saved.
"""

from holdfast.integrations.megatron.checkpointing import close, configure, load_checkpoint, save_checkpoint

__all__ = ["close", "configure", "load_checkpoint", "save_checkpoint"]
