"""Megatron-LM's older format, with files for each rank of tensor and pipeline parallelism."""
