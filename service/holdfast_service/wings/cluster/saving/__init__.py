"""Saves of which several nodes write parts."""
