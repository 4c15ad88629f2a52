"""Orbax, which saves the trees of JAX."""
