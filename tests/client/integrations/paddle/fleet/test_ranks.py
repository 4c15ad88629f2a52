"""The tensors of all ranks, by name."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.integrations.paddle.fleet.ranks import RankTensor, of_all_ranks, union
from holdfast.launch import StartedRanks
from holdfast_formats.errors import InvalidRequest

EMBEDDING = RankTensor((30, 6), "F32", "0")


def test_stages_have_their_own_tensors_and_share_some() -> None:
    first = {"embed": EMBEDDING, "0.weight": RankTensor((6, 6), "F32", "0")}
    last = {"1.weight": RankTensor((6, 6), "BF16", "1"), "embed": EMBEDDING}
    assert union([first, last]) == {**first, **last}


def test_all_ranks_get_what_each_says() -> None:
    """Through the store of texts, rank by rank: rank 0 waits for what the others have put there before."""
    texts: dict[str, str] = {}
    told = {0: {"0.weight": EMBEDDING}, 1: {"1.weight": RankTensor((), "BF16", "")}}
    with ThreadPoolExecutor(2) as threads:

        def take(key: str, wait_s: float) -> str:
            until = time.monotonic() + wait_s
            while key not in texts:
                assert time.monotonic() < until, key
                time.sleep(0.001)
            return texts[key]

        def ask(rank: int) -> dict[str, RankTensor]:
            ranks = StartedRanks(rank, 2, texts.__setitem__, take)
            return of_all_ranks(ranks, "test", told[rank], RankTensor)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("holdfast.integrations.paddle.fleet.ranks._asked", defaultdict(lambda: itertools.repeat(0)))
            patch.setattr("holdfast.launch.answer_of_rank_0", lambda question, answer, wait_s: answer())
            assert list(threads.map(ask, (0, 1))) == [told[0] | told[1]] * 2


@pytest.mark.parametrize(
    "other", [RankTensor((30, 7), "F32", "0"), RankTensor((30, 6), "BF16", "0"), RankTensor((30, 6), "F32", "")]
)
def test_one_name_for_different_tensors_is_refused(other: RankTensor) -> None:
    with pytest.raises(InvalidRequest, match=r"embed is not the same tensor .* on rank 0, and .* on rank 2"):
        union([{"embed": EMBEDDING}, {}, {"embed": other}])
