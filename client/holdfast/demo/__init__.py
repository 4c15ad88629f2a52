"""The demo: a trainer is killed in mid-run, goes on, and ends bit for bit where an uninterrupted run does."""

from .story import main as main
