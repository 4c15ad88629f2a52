"""Saves of all ranks, from the lease of a slot to the commit."""
