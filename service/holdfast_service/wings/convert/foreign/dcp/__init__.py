"""Checkpoints of torch.distributed.checkpoint (DCP): of plain PyTorch, torchtitan, Lightning, Megatron-core and NeMo."""
