"""choosing: the refusal names the checkpoint that has most of what is wanted, and how to go on with it."""

from __future__ import annotations

from holdfast_formats import restore_refusals


def test_the_checkpoint_with_most_of_it_is_named() -> None:
    """The newest of those, whatever else they have."""
    offers = {5: ["model", "optim"], 10: ["model", "optim", "extra"], 15: ["model"], 20: ["extra", "master"]}
    refusal = restore_refusals.lacking("llama", offers, ["model", "optim", "ema"])
    assert "no checkpoint of llama" in refusal.detail and "step 10 has the most, but lacks ema" in refusal.detail
    assert refusal.hint is not None and "exclude=['ema/*']" in refusal.hint and "('model', 'optim')" in refusal.hint
    assert refusal.problem().items() >= {"missing": ["ema"], "offered": ["model", "optim"]}.items()


def test_the_order_of_groups_says_nothing() -> None:
    """They come out sorted; where no checkpoint has any of them, all are missing."""
    refusal = restore_refusals.lacking("llama", {3: ["extra"], 4: ["extra"]}, ["optim", "model"])
    assert refusal.problem().items() >= {"missing": ["model", "optim"], "offered": []}.items()
    assert "step 4" in refusal.detail
