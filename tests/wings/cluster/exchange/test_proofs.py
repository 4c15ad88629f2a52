"""A proof is good for one request, at one address, on one connection; an answer's for what it answers."""

from __future__ import annotations

import pytest

from holdfast_formats.digest import DIGITS
from holdfast_service.wings.cluster.exchange.proofs import NodeQuestion, body_digest, is_nonce, new_nonce

ASKED = NodeQuestion("http://10.0.0.7:4000", "a" * 32, 1, "/held", body_digest(b"{}"))


def test_both_sides_make_the_same_proofs() -> None:
    """The one that asks and the one that is asked, with any of the secrets that are in force; no secret is in a proof."""
    made = ASKED.proven("one")
    assert "one" not in made.authorization.split()[1:]
    for known in (["one"], ["other", "one"], ("one", "one")):
        found = ASKED.check(made.authorization, known)
        assert found is not None
        mine = ASKED.check(made.authorization, ["one"])
        assert mine is not None
        assert found.head(200, 7) == mine.head(200, 7) and found.chunk("d" * DIGITS) == mine.chunk("d" * DIGITS)
        assert len(found.chunk("d" * DIGITS)) == DIGITS
    assert ASKED.check(made.authorization, ["two", ""]) is None
    assert ASKED.check(made.authorization, []) is None


@pytest.mark.parametrize(
    "changed",
    [
        ASKED._replace(url="http://10.0.0.7:4001"),
        ASKED._replace(nonce="b" * 32),
        ASKED._replace(number=2),
        ASKED._replace(path="/held/bytes"),
        ASKED._replace(body=body_digest(b"[]")),
    ],
)
def test_a_proof_is_good_for_nothing_else(changed: NodeQuestion) -> None:
    """Whoever hears it cannot use it at another node, on another connection, once more, or for something else."""
    assert changed.check(ASKED.proven("one").authorization, ["one"]) is None


def test_an_answer_is_good_for_its_question_alone() -> None:
    """An answer that was heard before proves nothing: each question has a nonce of its own."""
    first, again = ASKED.proven("one"), ASKED.proven("one")
    assert first.authorization != again.authorization
    assert first.answer.head(200, 7) != again.answer.head(200, 7)
    assert again.answer.head(200, 7) != again.answer.head(200, 8) != again.answer.head(409, 8)
    chunks = [again.answer.chunk("d" * DIGITS) for _ in range(2)]
    assert chunks[0] != chunks[1], "chunks do not change places"


def test_what_is_no_proof_is_refused() -> None:
    """Whatever stands in the header."""
    good = ASKED.proven("one").authorization
    for stated in ("", "Holdfast", good + "0", good.replace("Holdfast", "Bearer"), good.upper(), good.replace(" ", "  ")):
        assert ASKED.check(stated, ["one"]) is None
    assert is_nonce(new_nonce()) and not is_nonce("") and not is_nonce("A" * 32)
