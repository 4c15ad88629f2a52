"""The columns of lists: what a cell links to."""

from __future__ import annotations

from holdfast_formats.rest import lists
from holdfast_formats.rest.access import AuditEntry, Quota


def link_of(column: int, row: object, listing: lists.Listing) -> str | None:
    return listing.columns[column].parts(row)[0].link


def test_a_name_in_a_link_is_quoted() -> None:
    """A login of a proxy may have any character that an address has."""
    entry = AuditEntry.model_construct(who="ann+ml&run=x@site")
    assert link_of(1, entry, lists.AUDIT) == "/audit?who=ann%2Bml%26run%3Dx%40site"
    assert link_of(0, Quota.model_construct(pattern="llama&*"), lists.QUOTAS) == "/?q=llama%26"
