"""Daemons that share a root and a catalog: who is a member, who has which duty, and what one node tells the others."""
