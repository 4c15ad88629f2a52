"""Identify this process and its launch, so that all ranks of a launch share an attempt."""

from __future__ import annotations

import itertools
import json
import os
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from holdfast_formats.errors import CheckpointError, DeadlineExceeded, InvalidRequest, from_problem
from holdfast_formats.layout.mesh import Mesh

from .config import LaunchInfo, check_placed, launch_info

AGREED_WAIT_S = 1800.0  # for the name of a launch, which rank 0 makes up; as long as torch waits for its ranks

_constructed: defaultdict[tuple[str, ...], itertools.count[int]] = defaultdict(itertools.count)
_mark = uuid.uuid4().hex[:16]


def this_process() -> str:
    """A unique ID of this process on any machine; a forked child gets its own."""
    return f"{_mark}-{os.getpid()}"


class Launch(NamedTuple):
    """`name` is the unique ID of this launch, the same on all its ranks.

    `peers` ranks of it are on this machine, including this one; if unknown, all of them. `mesh`: how they are arranged, if
    the framework says so.
    """

    rank: int
    world: int
    name: str
    peers: int
    mesh: Mesh | None = None


class StartedRanks(NamedTuple):
    """The ranks that a framework has started together, and the store of texts that they share, which is no collective.

    `take` waits at most so many seconds for a text, and raises `DeadlineExceeded` then. `mesh`: which of them share rows,
    tensors and layers, if that is known.
    """

    rank: int
    world: int
    put: Callable[[str, str], None]
    take: Callable[[str, float], str]
    mesh: Mesh | None = None


_assigned: ContextVar[Callable[[], Launch] | None] = ContextVar("_assigned", default=None)
_announced: list[StartedRanks] = []  # one, or none


@contextmanager
def assigned(launch: Callable[[], Launch]) -> Iterator[None]:
    """Within this block `current` returns `launch`, whatever the environment contains."""
    before = _assigned.set(launch)
    try:
        yield
    finally:
        _assigned.reset(before)


@contextmanager
def alone() -> Iterator[None]:
    """Within this block `current` returns a launch of one rank, whatever the environment contains."""
    with assigned(lambda: Launch(0, 1, uuid.uuid4().hex, 1)):
        yield


def announce(ranks: StartedRanks) -> None:
    """From now on these are this process's ranks, in place of those of torch.distributed and of the environment."""
    _announced[:] = [ranks]


def current(run: str) -> Launch:
    """The launch of this process. Every rank must construct its checkpointers of a run in the same order.

    HOLDFAST_LAUNCH names it where it is set. Else, with ranks announced or torch.distributed initialised, rank 0 makes up a
    name and the others read it from the job's store (no collective). Without them, torchrun's run id and restart count
    serve. A single process is a launch of its own. Raises `InvalidRequest` when several ranks have nothing in common from
    which a name could be made, and when mpirun or srun has started several processes whose rank and world are not told.
    """
    assigned_now = _assigned.get()
    if assigned_now is not None:
        return assigned_now()
    information = launch_info()
    rank, world, name = _identity(run, information)
    mesh = _announced[0].mesh if _announced else None
    return Launch(rank, world, name, min(information.local_world or world, world), mesh)


def answer_of_rank_0(question: str, answer: Callable[[], Any], wait_s: float) -> Any:
    """Rank 0 answers for all ranks of torch.distributed, in JSON, through the job's store (no collective).

    Every rank asks its questions in the same order. Without torch.distributed each process answers by itself. Rank 0's
    error is raised on all ranks, and `DeadlineExceeded` if rank 0 does not ask within `wait_s` seconds.
    """
    ranks = _together()
    if ranks is None or ranks.world == 1:
        return answer()
    key = f"holdfast/answers/{question}/{launch_info().restart_count}/{next(_constructed['answers', question])}"
    if ranks.rank == 0:
        try:
            document = {"answer": answer()}
        except Exception as error:  # the others must not wait for an answer that never comes
            own = (
                error if isinstance(error, CheckpointError) else CheckpointError(f"rank 0: {type(error).__name__}: {error}")
            )
            ranks.put(key, json.dumps({"problem": own.problem()}))
            raise
        ranks.put(key, json.dumps(document))
    try:
        text = ranks.take(key, wait_s)
    except DeadlineExceeded as error:
        raise DeadlineExceeded(f"rank 0 has not answered {question!r} within {wait_s:.0f} s: {error.detail}") from error
    document = json.loads(text)
    if "problem" in document:
        raise from_problem(document["problem"])
    return document["answer"]


def _identity(run: str, information: LaunchInfo) -> tuple[int, int, str]:
    ranks = _together()
    if ranks is None:
        check_placed()
    rank = information.rank if ranks is None else ranks.rank
    world = information.world if ranks is None else ranks.world
    if information.launch is not None:  # several ranks may be in one process then: each counts its own
        ordinal = next(_constructed[run, information.launch, str(rank)])
        return rank, world, f"{information.launch}/{information.restart_count}/{ordinal}"
    ordinal = next(_constructed[run,])
    if world == 1:
        return rank, world, uuid.uuid4().hex
    if ranks is not None:
        return rank, world, _agree(ranks, f"holdfast/{run}/{information.restart_count}/{ordinal}")
    if information.run_id is None:
        raise InvalidRequest(
            f"these {world} ranks have no launch ID in common",
            hint="call torch.distributed.init_process_group() first, or set HOLDFAST_LAUNCH to an ID that is new at "
            "every start and the same on all ranks",
        )
    return rank, world, f"{information.run_id}/{information.restart_count}/{ordinal}"


def _together() -> StartedRanks | None:
    """The ranks that were announced, else those of torch.distributed; None if there are neither."""
    if _announced:
        return _announced[0]
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    store = torch.distributed.distributed_c10d._get_default_store()

    def take(key: str, wait_s: float) -> str:
        try:
            store.wait([key], timedelta(seconds=wait_s))
        except RuntimeError as error:
            raise DeadlineExceeded(str(error)) from error
        return str(store.get(key).decode())

    return StartedRanks(torch.distributed.get_rank(), torch.distributed.get_world_size(), store.set, take)


def _agree(ranks: StartedRanks, key: str) -> str:
    if ranks.rank == 0:
        name = uuid.uuid4().hex
        ranks.put(key, name)
        return name
    try:
        return ranks.take(key, AGREED_WAIT_S)
    except DeadlineExceeded as error:
        raise DeadlineExceeded(
            f"rank 0 has not constructed this checkpointer within {AGREED_WAIT_S:.0f} s: {error.detail}",
            hint="construct the checkpointers of a run on every rank, in the same order",
        ) from error
