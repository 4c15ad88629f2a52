"""The trainer's live objects as named leaves, and back."""
