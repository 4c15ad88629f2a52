"""Leaves of a state: what a tensor is, and where it lies in the whole."""
