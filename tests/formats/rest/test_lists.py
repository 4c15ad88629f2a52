"""The columns of lists: what a cell links to."""

from __future__ import annotations

import pytest

from holdfast_formats.rest import lists
from holdfast_formats.rest.access import AuditEntry, Quota
from holdfast_formats.rest.bodies import CheckpointInfo


def link_of(column: int, row: object, listing: lists.Listing) -> str | None:
    return listing.columns[column].parts(row)[0].link


def test_a_name_in_a_link_is_quoted() -> None:
    """A login of a proxy may have any character that an address has."""
    entry = AuditEntry.model_construct(who="ann+ml&run=x@site")
    assert link_of(1, entry, lists.AUDIT) == "/audit?who=ann%2Bml%26run%3Dx%40site"
    assert link_of(0, Quota.model_construct(pattern="llama&*"), lists.QUOTAS) == "/?q=llama%26"


@pytest.mark.parametrize(
    ("healthy", "nonfinite", "said"),
    [
        (None, None, None),
        (True, 0, "healthy"),
        (True, None, "healthy"),
        (False, 1, "1 value not finite"),
        (True, 3, "3 values not finite"),
    ],
)
def test_health_of_a_checkpoint(healthy: bool | None, nonfinite: int | None, said: str | None) -> None:
    """Unknown before the check; NaN that an earlier step had already are still said."""
    listing = lists.checkpoints(True)
    (column,) = (column for column in listing.columns if column.heading == "Health")
    assert column.parts(CheckpointInfo.model_construct(healthy=healthy, nonfinite=nonfinite))[0].value == said
    assert "Health" not in [column.heading for column in lists.checkpoints(False).columns]
