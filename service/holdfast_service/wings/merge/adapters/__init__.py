"""Adapters of PEFT: their configuration, their tensors, and the weights with them added."""
