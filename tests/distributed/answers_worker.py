"""Run by torchrun: rank 0 answers for all ranks, with a value, with an error of ours, and with one of anybody's."""

from __future__ import annotations

import time

import torch.distributed as dist

from holdfast.launch import answer_of_rank_0
from holdfast_formats.errors import CheckpointError, NoSuchCheckpoint
from tests.torchruns import leave


def fail(error: Exception) -> int:
    raise error


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    assert [answer_of_rank_0("step", lambda n=n: n + rank, 60) for n in (5, 7)] == [5, 7]
    try:
        answer_of_rank_0("step", lambda: fail(NoSuchCheckpoint("none")), 60)
    except NoSuchCheckpoint as told:
        assert told.detail == "none"
    else:
        raise AssertionError("an error was lost")
    began = time.monotonic()
    try:
        answer_of_rank_0("step", lambda: fail(OSError("the disk is away")), 60)
    except (OSError, CheckpointError) as told:
        assert "the disk is away" in str(told) and isinstance(told, OSError) == (rank == 0), told
        assert time.monotonic() - began < 50, "the other rank waited for an answer that could not come"
    else:
        raise AssertionError("an error was lost")
    assert answer_of_rank_0("step", lambda: [rank], 60) == [0]
    leave()


if __name__ == "__main__":
    main()
