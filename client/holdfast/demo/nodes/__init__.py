"""The demo of several nodes: one of them is lost for good, and the training goes on exactly with the others."""

from .story import STEPS as STEPS
from .story import main as main
