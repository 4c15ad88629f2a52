"""Defines every byte that two Holdfast processes must agree on.

Pure: no torch, no sockets, no threads; only `moments` reads the clock. `docs/format.md` states the on-disk format.
"""
