"""Leaves of a state: what a tensor is, and which part of the whole it holds."""
