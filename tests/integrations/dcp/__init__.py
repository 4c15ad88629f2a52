"""torch.distributed.checkpoint with Holdfast's writer and reader."""
