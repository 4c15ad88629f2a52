"""The ranks that `paddle.distributed` has started, and what they say of their tensors."""

from __future__ import annotations

import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from holdfast import launch
from holdfast.integrations.paddle.fleet.topology import mesh_of_ranks
from holdfast.launch import StartedRanks
from holdfast_formats.errors import DeadlineExceeded, InvalidRequest
from holdfast_formats.region import Shape

LISTED_WAIT_S = 600.0  # for the names of all ranks' tensors
_POLL_S = 0.02
_asked: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
Said = TypeVar("Said")


class RankTensor(NamedTuple):
    """A tensor that some rank has: the shape of the whole, the dtype by safetensors' name, and the key of the optimizer's
    group that steps it, empty if none does.
    """

    shape: Shape
    dtype: str
    group: str


def announce() -> StartedRanks | None:
    """Tell Holdfast of the ranks of `paddle.distributed`, if it has been initialised for several; returns them."""
    import paddle
    from paddle.distributed import collective

    store = collective._default_store  # no public name in 3.3.1
    if not paddle.distributed.is_initialized() or paddle.distributed.get_world_size() == 1 or store is None:
        return None

    def put(key: str, text: str) -> None:
        store.set(key, text)
        store.add(f"{key}/there", 1)

    def take(key: str, wait_s: float) -> str:
        until = time.monotonic() + wait_s
        while not store.add(f"{key}/there", 0):  # `get` has a deadline of its own, of a quarter of an hour
            if time.monotonic() > until:
                raise DeadlineExceeded(f"no rank has written {key} within {wait_s:.0f} s")
            time.sleep(_POLL_S)
        return bytes(store.get(key)).decode()

    world = paddle.distributed.get_world_size()
    ranks = StartedRanks(paddle.distributed.get_rank(), world, put, take, mesh_of_ranks(world))
    launch.announce(ranks)
    return ranks


def of_all_ranks(ranks: StartedRanks, what: str, own: Mapping[str, Said], kind: Callable[..., Said]) -> dict[str, Said]:
    """What all ranks say of each of their tensors, by name, in a NamedTuple of this kind.

    Every rank asks for the same `what`, in the same order; no collective is used. Raises `InvalidRequest` on all ranks for a
    name of which they say different things.
    """
    question = f"paddle/{what}"
    key = f"holdfast/{question}/{next(_asked[what])}"
    ranks.put(f"{key}/{ranks.rank}", json.dumps(own))

    def merge() -> dict[str, Any]:
        return dict(union(json.loads(ranks.take(f"{key}/{rank}", LISTED_WAIT_S)) for rank in range(ranks.world)))

    merged = launch.answer_of_rank_0(question, merge, LISTED_WAIT_S)
    return {name: kind(*(tuple(part) if isinstance(part, list) else part for part in said)) for name, said in merged.items()}


def union(told: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What several ranks say, in the order of the ranks; `InvalidRequest` for a name of which they say different things."""
    found: dict[str, Any] = {}
    first: dict[str, int] = {}
    for rank, own in enumerate(told):
        for name, said in own.items():
            known = found.setdefault(name, said)
            if known != said:
                raise InvalidRequest(
                    f"{name} is not the same tensor on all ranks: {known} on rank {first[name]}, and {said} on rank {rank}",
                    hint="give tensors of different ranks different names, and shards of one tensor a split_axis",
                    tensor=name,
                )
            first.setdefault(name, rank)
    return found
