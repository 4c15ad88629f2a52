"""Pickles and torch files, read by an interpreter that calls nothing. Entry point: `holdfast_formats.foreign.pickles`."""
