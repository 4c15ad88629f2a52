"""Checkpoints of DeepSpeed: ZeRO 1, 2 and 3, whose partitions become whole tensors."""
