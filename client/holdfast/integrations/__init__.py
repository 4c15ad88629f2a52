"""Holdfast inside training frameworks: one module each, which imports its framework when it is used.

Nothing else in `holdfast` imports this package, and no framework is a dependency of Holdfast.
"""
