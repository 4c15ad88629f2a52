"""Placeholder while building."""
