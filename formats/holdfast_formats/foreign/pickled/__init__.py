"""Pickles and torch files, read by an interpreter that calls nothing. Its door is `holdfast_formats.foreign.pickles`."""
