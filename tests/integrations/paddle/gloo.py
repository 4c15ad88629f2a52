"""Fleet on a CPU: what Paddle 3.3.1 refuses there or has no kernels for is made of what it has.

On its own, Paddle trains on a CPU with data parallelism, and with stage 1 without split_param. It lacks: `reduce_scatter`,
bfloat16 and calls on the "calculation stream" in gloo; the alignment of communication buffers; `c_identity`; and a device
number for pipelines. `group_sharded_parallel` asserts that there is a GPU. Nothing here knows of Holdfast, or touches what a
rank holds.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import paddle
from paddle.base import core
from paddle.distributed import fleet, parallel, sharding
from paddle.distributed.fleet.layers.mpu import mp_ops
from paddle.distributed.fleet.meta_parallel import tensor_parallel
from paddle.distributed.fleet.meta_parallel.sharding import (
    group_sharded_optimizer_stage2,
    group_sharded_stage2,
    group_sharded_stage3,
    group_sharded_storage,
)
from paddle.distributed.fleet.utils import hybrid_parallel_util, tensor_fusion_helper

from tests.daemons import free_port

ALIGNMENT = 256  # bytes, as on a GPU
LISTEN, LISTENS_S = "0A", 60.0  # the state in /proc/net/tcp, and how long to look for it
# What torchrun tells a rank, and no launcher of Paddle.
OF_TORCHRUN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
)


class Done:
    """What gloo's calls that have ended return."""

    def wait(self) -> bool:
        return True


def place() -> None:
    """Tell a rank of `tests.integrations.resuming` what paddle.distributed.launch would; one that it started knows that."""
    told = {name: os.environ.pop(name, None) for name in OF_TORCHRUN}
    world, rank = int(told["WORLD_SIZE"] or 1), int(told["RANK"] or 0)
    parallel._global_parallel_env = None  # a fork has what was there when Paddle was imported
    if "paddleformers.utils.distributed" in sys.modules:
        sys.modules["paddleformers.utils.distributed"].world_size = world
    if world == 1:
        return
    port = int(os.environ["MASTER_PORT"])
    ends = [f"127.0.0.1:{port + number}" for number in range(world)]
    os.environ |= {"PADDLE_TRAINER_ID": str(rank), "PADDLE_TRAINERS_NUM": str(world), "PADDLE_LOCAL_SIZE": str(world)}
    os.environ["PADDLE_RANK_IN_NODE"] = str(rank)
    os.environ |= {"PADDLE_TRAINER_ENDPOINTS": ",".join(ends), "PADDLE_CURRENT_ENDPOINT": ends[rank]}
    os.environ |= {"PADDLE_MASTER": f"127.0.0.1:{port}", "PADDLE_DISTRI_BACKEND": "gloo"}


def begin(**degrees: int) -> Any:
    """`fleet.init` with these degrees, such as mp_degree=2; returns the strategy, whose other options may still be set."""
    paddle.set_device("cpu")
    complete()
    strategy = fleet.DistributedStrategy()
    whole = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 1, "sharding_degree": 1}
    strategy.hybrid_configs = {**whole, **degrees}
    return strategy


def complete() -> None:
    """Add what Paddle lacks on a CPU."""
    tensor_fusion_helper.alignment["unknown"] = ALIGNMENT
    parallel.ParallelEnv._device_id = 0
    gloo = core.ProcessGroupGloo
    gloo.reduce_scatter_tensor = _reduce_scatter
    gloo.all_reduce_on_calc_stream = lambda self, tensor, op=core.ReduceOp.SUM: self.all_reduce(tensor, op, True).wait()
    gloo.send_on_calc_stream = lambda self, tensor, to: self.send(tensor, to, True).wait()
    gloo.recv_on_calc_stream = lambda self, tensor, source: self.recv(tensor, source, True).wait()
    gloo.broadcast = _in_float32(gloo.broadcast, 0)
    gloo.all_reduce = _in_float32(gloo.all_reduce, 0)
    gloo.create = _with_own_store(gloo.create)
    core.create_or_get_global_tcp_store = _once_it_listens(core.create_or_get_global_tcp_store)
    mp_ops._C_ops = _Operators(mp_ops._C_ops)
    tensor_parallel.broadcast_input_data = _broadcast_inputs


def _reduce_scatter(self: Any, part: Any, whole: Any, op: Any, _: bool) -> Done:
    total = whole.clone()
    self.all_reduce(total, op, True).wait()
    begin = self.rank() * part._numel()
    paddle.assign(total._slice(begin, begin + part._numel()), part)
    return Done()


def _broadcast_inputs(hcg: Any, *given: Any, **named: Any) -> Any:
    for value in (*given, *named.values()):
        if isinstance(value, paddle.Tensor):
            with paddle.no_grad():
                hybrid_parallel_util._broadcast_data_help(value, value.shape, value.dtype, hcg)
    return given, named


def _in_float32(own: Callable[..., Any], at: int) -> Callable[..., Any]:
    def call(self: Any, *given: Any) -> Any:
        tensor = given[at]
        if getattr(tensor, "dtype", None) != paddle.bfloat16:
            return own(self, *given)
        wide = tensor.astype("float32")
        own(self, wide, *given[1:]).wait()
        paddle.assign(wide.astype("bfloat16"), tensor)
        return Done()

    return call


def _once_it_listens(own: Callable[[], Any]) -> Callable[[], Any]:
    """Paddle sleeps three seconds where a rank comes before the first one listens."""

    def made() -> Any:
        port, until = int(os.environ.get("PADDLE_MASTER", ":0").rpartition(":")[2]), time.monotonic() + LISTENS_S
        listening = f":{port:04X} 00000000:0000 {LISTEN}"
        while port and os.environ["PADDLE_TRAINER_ID"] != "0" and time.monotonic() < until:
            if listening in Path("/proc/net/tcp").read_text():
                break
            time.sleep(0.02)
        return own()

    return made


def _with_own_store(own: Callable[..., Any]) -> Callable[..., Any]:
    """Paddle's groups of gloo write the same names into one store, so that groups of other ranks cannot be made at once."""
    stores = []

    def create(store: Any, rank: int, world: int, group: int) -> Any:
        if world > 1 and group > 0:
            if rank == 0:
                port = free_port()
                own_store = core.TCPStore("127.0.0.1", port, True, 1)  # of one rank: it waits for none
                store.set(f"gloo/{group}", str(port))
            else:
                own_store = core.TCPStore("127.0.0.1", int(bytes(store.get(f"gloo/{group}"))), False, world)
            store = own_store
            stores.append(store)
        return own(store, rank, world, group)

    return create


class _Operators:
    """Paddle's operators, of which some have no kernel for a CPU."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def c_identity(self, tensor: Any, *_: Any) -> Any:
        return paddle.assign(tensor)

    def c_softmax_with_cross_entropy(self, logits: Any, label: Any, ignored: int, group: int, rank: int, _: int) -> Any:
        """Of logits whose classes are divided among the ranks of a group."""
        ranks, size = paddle.distributed.collective._get_group_map()[group], logits.shape[-1]
        top = logits.detach().max(-1, keepdim=True)
        paddle.distributed.all_reduce(top, paddle.distributed.ReduceOp.MAX, ranks)
        shifted = logits - top
        powers = paddle.exp(shifted)
        total = mp_ops._mp_allreduce(powers.sum(-1, keepdim=True), group=ranks)
        own = (label - rank * size == paddle.arange(size)).astype(logits.dtype)
        chosen = mp_ops._mp_allreduce((shifted * own).sum(-1, keepdim=True), group=ranks)
        loss = paddle.where(label == ignored, paddle.zeros_like(chosen), paddle.log(total) - chosen)
        return powers / total, loss


def allow_group_sharded() -> None:
    """From now on this process passes for one with a GPU where Paddle only asks in order to refuse."""
    core.is_compiled_with_cuda = lambda: True
    _move_nothing()


def replace_group_sharded_parallel(segment: int) -> None:
    """From now on `group_sharded_parallel` makes what it makes on a GPU. Stage 3 leaves parameters of up to so many elements
    whole.
    """

    def made(model: Any, optimizer: Any, *, level: str, scaler: Any, exclude_layer: Any, **named: Any) -> Any:
        gpu = mock.patch.object(core, "is_compiled_with_cuda", lambda: True)
        named["device"] = "cpu"
        with gpu:
            if level == "p_g_os":
                more = {"segment_size": segment, "exclude_layer": exclude_layer}
                return group_sharded_stage3.GroupShardedStage3(model, optimizer, **more, **named), optimizer, scaler
            stepped = group_sharded_optimizer_stage2.GroupShardedOptimizerStage2(
                optimizer._parameter_list, optimizer, **named
            )
            del named["offload"]
            return group_sharded_stage2.GroupShardedStage2(model, stepped, **named), stepped, scaler

    sharding.group_sharded_parallel = made
    _move_nothing()


def _move_nothing() -> None:
    paddle.get_device = lambda: "cpu:0"
    paddle.Tensor.cpu = lambda self, *_: paddle.assign(self)  # a copy, as from a GPU
    group_sharded_storage.cvt_to_device = lambda tensor, *_: tensor
    for module in (group_sharded_stage3, group_sharded_optimizer_stage2):
        module.alignment["cpu"] = ALIGNMENT
