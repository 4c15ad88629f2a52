"""What goes of a full log is what there is most of."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.control.catalog.evictions import evictions


@given(st.dictionaries(st.tuples(st.text(max_size=2), st.text(max_size=1), st.booleans()), st.integers(1, 99)), st.data())
def test_what_goes_is_what_there_is_most_of(counts: dict[tuple[str, str, bool], int], data: st.DataObject) -> None:
    """As many as are too many, or a few more where several have as many; none of whoever has less than is left of those."""
    excess = data.draw(st.integers(0, sum(counts.values())))
    gone = evictions(counts, excess)
    assert excess <= sum(gone.values()) < excess + max(len(counts), 1)
    left = {author: count - gone.get(author, 0) for author, count in counts.items()}
    assert all(number > 0 for number in gone.values()) and all(number >= 0 for number in left.values())
    if gone:
        assert max(left.values(), default=0) == min(left[author] for author in gone)
