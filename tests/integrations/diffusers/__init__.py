"""Pipelines, with the real diffusers."""
