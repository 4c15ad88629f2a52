"""Patterns of runs, and what a caller may save by its grants."""

from __future__ import annotations

import pytest

from holdfast_formats.rest.access import Grant, Whoami, matches


@pytest.mark.parametrize(
    ("pattern", "run", "seen"),
    [
        ("*", "x", True),
        ("ab*", "abc", True),
        ("ab*", "ab", True),
        ("ab*", "a", False),
        ("ab", "ab", True),
        ("ab", "abc", False),
    ],
)
def test_matching(pattern: str, run: str, seen: bool) -> None:
    """A prefix is one of characters, a name is the whole name."""
    assert matches(pattern, run) is seen


def test_the_grants_of_a_person_say_what_may_be_saved() -> None:
    """Without grants, as for a token, its own scope and runs do."""
    told = {"name": "ada", "by": "token", "address": ""}
    token = Whoami.model_validate({**told, "scope": "write", "runs": "a-*,b"})
    assert token.may_save("a-1") and token.may_save("b") and not token.may_save("c")
    assert not token.model_copy(update={"scope": "read"}).may_save("b")
    grants = [Grant(scope="write", runs="a-*"), Grant(scope="read", runs="*")]
    person = Whoami.model_validate({**told, "scope": "write", "runs": "*", "grants": grants})
    assert person.may_save("a-1") and not person.may_save("b")
