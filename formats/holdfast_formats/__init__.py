"""The agreement: every byte that two Holdfast processes must agree on.

Pure: no torch, no sockets, no threads, no clock. `docs/format.md` states the on-disk format.
"""
