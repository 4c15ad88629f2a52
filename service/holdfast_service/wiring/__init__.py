"""Puts the rooms together."""
