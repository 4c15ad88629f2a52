"""Requests in words, with their price."""

from __future__ import annotations

from holdfast_files.objects import costs

SAVE = {"requests": 13.0, "requests_put": 3.0, "requests_head": 10.0, "retries": 1.0}


def test_a_save_and_its_check() -> None:
    """Writes and reads have prices of their own; what asked for nothing has no line."""
    assert costs.of_save(SAVE | {"check_requests": 5.0, "check_retries": 2.0}) == (
        "13 to save it (3 writes and lists, 10 reads), 5 to verify it; 3 repeated; 0.00002 USD at AWS's prices"
    )
    assert costs.of_save({"bytes": 1.0}) == costs.of_copy({}) == costs.of_copy(None) == ""


def test_a_copy() -> None:
    """Its read-back is among its reads."""
    expected = "13 requests (3 writes and lists, 10 reads), 1 repeated; 0.00002 USD at AWS's prices"
    assert costs.of_copy(SAVE) == expected
