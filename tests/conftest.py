"""Settings of the whole test suite."""

from __future__ import annotations

from hypothesis import settings

# No deadlines: a busy machine must not turn a correct test red.
settings.register_profile("holdfast", deadline=None, derandomize=False, max_examples=60)
settings.load_profile("holdfast")
