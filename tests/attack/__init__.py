"""Attacks on a whole service from outside; the long ones by `make attack` alone."""
