"""Checkpoints of PaddleNLP and PaddleFormers: unified, FlexCheckpoint, sharding_io (also zero-cost), legacy and LoRA."""
