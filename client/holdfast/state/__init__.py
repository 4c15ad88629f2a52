"""Turns the trainer's live objects into named leaves, and back."""
