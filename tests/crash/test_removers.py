"""All removers, any damage, any clock, any policy, at length: what could be restored before can be restored after."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.control.removers import Removers

TestRemovers = pytest.mark.crash_slow(Removers.TestCase)
TestRemovers.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
