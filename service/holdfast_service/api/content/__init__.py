"""Answers of many bytes."""
