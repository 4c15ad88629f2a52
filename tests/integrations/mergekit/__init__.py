"""Merges compared with those of the real mergekit."""
