"""Paddle warns while it is imported, of what it would compile."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import paddle  # noqa: F401
