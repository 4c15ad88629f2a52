"""Optimizer state that ranks do not share as they share its parameter: blocks of codes, and state that one rank has."""
