"""Tags of runs: what one may be, and how many a run may have."""

from __future__ import annotations

import pytest

from holdfast_formats.errors import InvalidRequest, LimitExceeded
from holdfast_formats.tags import TAGS_MAX, check_tags


def test_tags_are_sorted_and_each_is_there_once() -> None:
    assert check_tags(["sweep:lr", "8-experts", "lr=1e-4", "sweep:lr", "a" * 64]) == (
        "8-experts",
        "a" * 64,
        "lr=1e-4",
        "sweep:lr",
    )


@pytest.mark.parametrize("tag", ["", " ", "two words", "a,b", "-x", "ä", "a/b", "a\n", "a" * 65])
def test_what_is_no_tag_is_refused_by_its_text(tag: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_tags(["fine", tag])
    assert repr(tag) in caught.value.detail and "1 to 64" in caught.value.hint


def test_too_many_tags_are_refused() -> None:
    assert len(check_tags(f"t{number}" for number in range(TAGS_MAX))) == TAGS_MAX
    with pytest.raises(LimitExceeded, match="33 tags"):
        check_tags(f"t{number}" for number in range(TAGS_MAX + 1))
