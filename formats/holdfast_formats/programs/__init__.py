"""Mapping programs: statements that say how the tensors of one checkpoint become those of another."""
