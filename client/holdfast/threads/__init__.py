"""Signals, forks, and the end of a process: calls that interrupt other calls."""
