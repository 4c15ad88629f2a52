"""The demo of several nodes: one of them is lost for good, and the training continues exactly with the others."""

from .story import STEPS as STEPS
from .story import main as main
