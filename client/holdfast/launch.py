"""Identify this process and its launch, so that all ranks of a launch share an attempt."""

from __future__ import annotations

import itertools
import os
import uuid
from collections import defaultdict
from typing import NamedTuple

import torch

from holdfast_formats.errors import InvalidRequest

from .config import LaunchInfo, launch_info

_constructed: defaultdict[tuple[str, ...], itertools.count[int]] = defaultdict(itertools.count)
_mark = uuid.uuid4().hex[:16]


def this_process() -> str:
    """A unique ID of this process on any machine; a forked child gets its own."""
    return f"{_mark}-{os.getpid()}"


class Launch(NamedTuple):
    """`name` is the unique ID of this launch, the same on all its ranks.

    `peers` ranks of it are on this machine, including this one; if unknown, all of them.
    """

    rank: int
    world: int
    name: str
    peers: int


def current(run: str, given: str | None) -> Launch:
    """The launch of this process. Every rank must construct its checkpointers of a run in the same order.

    HOLDFAST_LAUNCH names it where it is set. Else, with torch.distributed initialised, rank 0 makes up a name and the
    others read it from the job's store (no collective). Without it, torchrun's run id and restart count serve. A single
    process is a launch of its own. `given` is the old way to state a name. Raises `InvalidRequest` when it and the
    environment both do, and when several ranks have nothing in common from which a name could be made.
    """
    information = launch_info()
    if given is not None and information.launch is not None:
        raise InvalidRequest("launch= and HOLDFAST_LAUNCH both name the launch", hint="leave launch= out: it is the old way")
    rank, world, name = _identity(run, given, information)
    return Launch(rank, world, name, min(information.local_world or world, world))


def _identity(run: str, given: str | None, information: LaunchInfo) -> tuple[int, int, str]:
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if together else information.rank
    world = torch.distributed.get_world_size() if together else information.world
    if information.launch is not None:  # whoever sets it may have several ranks in one process: each counts its own
        ordinal = next(_constructed[run, information.launch, str(rank)])
        return rank, world, f"{information.launch}/{information.restart_count}/{ordinal}"
    ordinal = next(_constructed[run,])
    if given is not None:
        return rank, world, given
    if together:
        return rank, world, _agree(f"holdfast/{run}/{information.restart_count}/{ordinal}", rank, world)
    if world == 1:
        return rank, world, uuid.uuid4().hex
    if information.run_id is None:
        raise InvalidRequest(
            f"these {world} ranks have no launch ID in common",
            hint="call torch.distributed.init_process_group() first, or set HOLDFAST_LAUNCH to an ID that is new at "
            "every start and the same on all ranks",
        )
    return rank, world, f"{information.run_id}/{information.restart_count}/{ordinal}"


def _agree(key: str, rank: int, world: int) -> str:
    if world == 1:
        return uuid.uuid4().hex
    store = torch.distributed.distributed_c10d._get_default_store()
    if rank == 0:
        name = uuid.uuid4().hex
        store.set(key, name)
        return name
    return str(store.get(key).decode())
