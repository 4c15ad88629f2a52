"""The storage side of Holdfast: a daemon that owns shared memory, and the control that decides what becomes of it."""

__version__ = "0.1.0"
