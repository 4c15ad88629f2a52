"""Pickles and torch files, read by an interpreter that calls nothing. Entry point: `foreign/pickles`."""
