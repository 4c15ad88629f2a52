"""Signals, forks, and the end of a process: what calls do in the middle of others."""
