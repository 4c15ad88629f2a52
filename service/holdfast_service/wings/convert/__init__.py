"""Imports of other programs' checkpoints, exports for other programs, and conversions from one to the other."""
