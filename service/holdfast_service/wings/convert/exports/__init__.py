"""Exports: a committed checkpoint as the files that another library loads."""
