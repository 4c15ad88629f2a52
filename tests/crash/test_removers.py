"""All removers, any damage, any clock, any policy, at length: what could be restored before can be restored after."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.control.removers import Removers


@pytest.mark.crash_slow
class TestRemovers(Removers.TestCase):
    """A class of its own: `Removers.TestCase` is one class, whose settings another module sets too."""

    settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
