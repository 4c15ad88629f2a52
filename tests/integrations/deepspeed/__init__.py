"""Engines of DeepSpeed that save with Holdfast, on the CPU with gloo."""
