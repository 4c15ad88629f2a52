"""Holdfast inside the frameworks that people train with: one module for each, which imports its framework when it is used.

Nothing else in `holdfast` imports this room, and no framework is a dependency of Holdfast.
"""
