"""Merges checkpoints of one architecture into one, by mergekit's recipes: element by element, in bounded memory."""
