"""Assembles the service from its packages."""
