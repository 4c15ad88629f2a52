"""Daemons that share a root and a catalog: membership, duties, and records that nodes exchange."""
