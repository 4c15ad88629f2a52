"""Optimizer state that ranks do not share as they share its parameter."""
