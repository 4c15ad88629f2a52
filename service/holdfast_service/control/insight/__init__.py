"""Figures of runs, and what of them needs attention."""
