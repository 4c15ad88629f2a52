"""Checkpoints read back: verified, tried in other layouts, looked at for NaN."""
