"""A daemon that serves its root alone is every node."""

from __future__ import annotations

import pytest

from holdfast_formats.errors import NoSuchResource
from holdfast_service.control.nodes import UPKEEP, OneNode, deciding


def test_one_node_has_all_duties_and_waits_for_no_lock() -> None:
    """Nothing is read, connected or shown elsewhere."""
    nodes = OneNode()
    assert nodes.has(UPKEEP) and nodes.holds.elsewhere("run") == {} and nodes.connected() == set()
    with nodes.locked(deciding("run")) as check, nodes.locked(deciding("run")):
        check()
    assert nodes.members() == () and nodes.census().states == {"live": 1} and nodes.beaten_s() is None


def test_there_is_no_other_node_to_forget() -> None:
    """Nor a secret to rotate."""
    for act in (lambda: OneNode().forget("b"), OneNode().rotate_secret):
        with pytest.raises(NoSuchResource):
            act()
