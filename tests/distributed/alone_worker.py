"""Run by torchrun: only rank 0 saves, while the other one waits for it in a barrier; then the other one tries too.

alone_worker.py SOCKET
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from holdfast import Checkpointer
from holdfast_formats.errors import RunBusy, StateMismatch
from tests.torchruns import leave


def check(socket: str, rank: int) -> None:
    """Save and restore on rank 0, and be refused on rank 1."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (2,))
    whole = DTensor.from_local(torch.ones(3), mesh, [Replicate()], run_check=False)
    state = {"model": model, "whole": whole}
    if rank == 0:
        checkpointer = Checkpointer.alone("run", state, at=socket)
        assert checkpointer.restore() == 0
        assert checkpointer.save(1, wait="durable").result().step == 1
        state["part"] = DTensor.from_local(torch.ones(3), mesh, [Shard(0)], run_check=False)
        try:
            checkpointer.save(2)
        except StateMismatch as refused:
            assert "'part'" in str(refused) and "3 of its 6 elements" in str(refused), refused
            assert "full_tensor()" in refused.hint
        else:
            raise AssertionError("a part was saved as if it were the whole")
        del state["part"]
    dist.barrier()
    if rank == 1:
        for act in (lambda one: one.restore(), lambda one: one.save(2)):
            try:
                act(Checkpointer.alone("run", state, at=socket))
            except RunBusy as refused:
                assert "with Checkpointer.alone(), only one rank of a job" in refused.hint, refused.hint
            else:
                raise AssertionError("two ranks saved one run, each for itself")
        with Checkpointer.alone("mine", state, at=socket) as own:
            own.save(5, wait="durable")
    dist.barrier()
    if rank == 0:
        checkpointer.save(2, wait="durable")
        expected = model.module.weight.detach().clone()
        with torch.no_grad():
            model.module.weight.zero_()
        assert checkpointer.restore() == 2 and torch.equal(model.module.weight, expected)
        checkpointer.close()
    dist.barrier()
    together = Checkpointer("run", state, at=socket)
    assert together.restore() == 2, "every rank can restore what one of them saved"
    together.save(3, wait="durable")
    dist.barrier()
    together.close()


def main() -> None:
    dist.init_process_group("gloo")
    check(sys.argv[1], dist.get_rank())
    leave()


if __name__ == "__main__":
    main()
