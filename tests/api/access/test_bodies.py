"""Bodies that cost more to refuse than to send."""

from __future__ import annotations

import json

import pytest

from holdfast_formats.errors import LimitExceeded
from holdfast_service.api.access import bodies


def test_members_are_counted_before_each_is_complained_about() -> None:
    """A report of a kilobyte for each `{}` of a megabyte took 13 s and 450 MiB. Commas in texts are none."""
    with pytest.raises(LimitExceeded, match="members"):
        bodies.parse(b'{"best": [' + b"{}," * (bodies.MEMBERS_MAX + 1) + b"{}]}")
    assert bodies.parse(json.dumps({"text": '\\",' * bodies.MEMBERS_MAX, "steps": list(range(10_000))}).encode())
