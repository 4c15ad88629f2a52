"""The service of Holdfast: a daemon that owns shared memory, and the control that decides about checkpoints."""

__version__ = "0.1.0"
