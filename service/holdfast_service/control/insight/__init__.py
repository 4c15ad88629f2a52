"""Figures of runs, and what needs attention."""
