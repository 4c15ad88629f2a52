"""Decisions: plans, rounds, commits, retention, and the catalog that remembers them. Tensor bytes never come here."""
