"""The demo: a trainer is killed in mid-run, resumes, and ends bit for bit where an uninterrupted run does."""

from .story import main as main
