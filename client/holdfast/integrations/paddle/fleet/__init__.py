"""Parallel training by `paddle.distributed.fleet`: which part of each whole tensor a rank holds."""
