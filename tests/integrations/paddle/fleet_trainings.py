"""Small trainings in each form of fleet's parallelism, and what their ranks hold.

A kind is a form, plain or in half precision: `v2`, or `v2-half`, whose weights are bfloat16 with masters, as in AMP O2.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import nn
from paddle.base import core
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import (
    ColumnParallelLinear,
    LayerDesc,
    PipelineLayer,
    RowParallelLinear,
    SharedLayerDesc,
    VocabParallelEmbedding,
    get_rng_state_tracker,
)
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_optimizer_stage2 import GroupShardedOptimizerStage2
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage2 import GroupShardedStage2
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3 import GroupShardedStage3
from paddle.distributed.fleet.utils import mix_precision_utils

from tests.integrations.paddle import gloo
from tests.integrations.paddle.half import MasterAdamW, compute_in_float32

VOCABULARY, WIDTH, INNER, ROWS = 30, 6, 10, 8
SEGMENT = 20  # elements up to which stage 3 leaves a parameter whole
DEGREES = {"plain": {}, "dp": {"dp_degree": 2}, "tp": {"mp_degree": 2}, "pp": {"pp_degree": 2}, "pipeline": {}}
DEGREES |= {"tp.v1": {"mp_degree": 2, "sharding_degree": 2}, "tp.pp": {"mp_degree": 2, "pp_degree": 2}}
SHARDED = {"sharding_degree": 2}  # v1, v2, 2 and 3
PIPELINES = ("pp", "pipeline", "tp.pp")


class Net(nn.Layer):
    """Every kind of parameter: cut by column, row and vocabulary, whole, frozen, and smaller than the number of ranks."""

    def __init__(self, tensor_parallel: bool) -> None:
        super().__init__()
        if tensor_parallel:
            self.embed = VocabParallelEmbedding(VOCABULARY, WIDTH)
            self.up = ColumnParallelLinear(WIDTH, INNER, has_bias=True, gather_output=False)
            self.down = RowParallelLinear(INNER, WIDTH, has_bias=True, input_is_parallel=True)
        else:
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.up = nn.Linear(WIDTH, INNER)
            self.down = nn.Linear(INNER, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH, bias_attr=False)
        self.frozen.weight.stop_gradient = True
        self.scale = self.create_parameter([1], default_initializer=nn.initializer.Constant(1.0))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, rows: Any) -> Any:
        held = self.embed(rows)
        inner = nn.functional.relu(self.up(held))
        with get_rng_state_tracker().rng_state("local_seed"):
            inner = self.drop(inner)
        held = self.norm(held + self.drop(self.down(inner)))
        return self.head((held + self.frozen(held)) * self.scale)


def tied_head(embedding: Any, held: Any) -> Any:
    return paddle.matmul(held, embedding.weight.astype("float32"), transpose_y=True)


class Block(nn.Layer):
    def __init__(self, tensor_parallel: bool) -> None:
        super().__init__()
        if tensor_parallel:
            self.up = ColumnParallelLinear(WIDTH, INNER, has_bias=True, gather_output=False)
            self.down = RowParallelLinear(INNER, WIDTH, has_bias=True, input_is_parallel=True)
        else:
            self.up = nn.Linear(WIDTH, INNER)
            self.down = nn.Linear(INNER, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, held: Any) -> Any:
        return held + self.drop(self.down(nn.functional.relu(self.up(held))))


class Loss(nn.Layer):
    def forward(self, out: Any, labels: Any) -> Any:
        return nn.functional.cross_entropy(out.reshape([-1, VOCABULARY]), labels.reshape([-1]))


class Training(NamedTuple):
    """What fleet has made of a layer and its optimizer. `net` is the layer itself."""

    form: str
    net: Any
    model: Any
    optimizer: Any
    scheduler: Any

    @property
    def accumulated(self) -> int:
        """The batches of a step. A pipeline divides its batch by itself."""
        return 1 if self.form in ("2", "3", *PIPELINES) else 2

    @property
    def tensor_ranks(self) -> int:
        """Among how many ranks a tensor is divided."""
        return int(fleet.get_hybrid_communicate_group().get_model_parallel_world_size())

    def seed(self, seed: int) -> None:
        """Seed the streams that have no name: those of a device differ among replicas and stages."""
        replica = self.replicas()[1]
        random.seed(seed + replica)
        np.random.seed(seed + replica)
        stage = fleet.get_hybrid_communicate_group().get_stage_id()
        core.default_cpu_generator().manual_seed(seed + 10 * replica + stage)

    def replicas(self) -> tuple[int, int]:
        """Among how many replicas the rows are divided, and the number of this one."""
        group = fleet.get_hybrid_communicate_group()
        sharded = group.get_sharding_parallel_world_size()
        number = group.get_data_parallel_rank() * sharded + group.get_sharding_parallel_rank()
        return group.get_data_parallel_world_size() * sharded, number

    def step(self, *batches: Any) -> float:
        """One step on these rows, whose gradients are accumulated; returns the sum of the losses."""
        if self.form in PIPELINES:
            loss = float(self.model.train_batch([batches[0], batches[0]], self.optimizer))
        else:
            model = self.net if self.form.startswith("tp") else self.model  # Paddle's wrapper refuses a CPU
            loss = 0.0
            for number, rows in enumerate(batches, 1):
                with self._last(number == len(batches)):
                    part = Loss()(model(rows), rows) / len(batches)
                    part.backward()
                loss += float(part)
            self.optimizer.step()
            self.optimizer.clear_grad()
        self.scheduler.step()
        return loss

    def _last(self, last: bool) -> Any:
        """Data parallelism reduces the gradients of the last batch of a step, with those before."""
        return nullcontext() if last or self.form != "dp" else self.model.no_sync()


def training(kind: str, seed: int) -> Training:
    """A training of this kind. Its form is a key of `DEGREES`; v1, v2, 2 or 3 for the stages of sharding; or `pipeline`, of
    one stage.
    """
    form, _, half = kind.partition("-")
    strategy = gloo.begin(**DEGREES.get(form, SHARDED))
    if form == "v2":
        strategy.hybrid_configs["sharding_configs"].split_param = True
    # gloo sends no part of a tensor
    batches = {"accumulate_steps": 2, "micro_batch_size": ROWS // 2}
    strategy.pipeline_configs = {**batches, "enable_partial_send_recv": False}
    fleet.init(is_collective=True, strategy=strategy)
    rank = paddle.distributed.get_rank()
    tracker = get_rng_state_tracker()
    tracker.reset()
    paddle.seed(seed)
    for number, name in enumerate(("model_parallel_rng", "local_seed")):
        tracker.add(name, 1000 + 100 * seed + 10 * number + rank)
    net = _pipeline() if form in PIPELINES else Net(form.startswith("tp"))
    if half:
        net.to(dtype="bfloat16")
    scheduler = paddle.optimizer.lr.ExponentialDecay(0.02, 0.9)
    clip = None if form in ("2", "3") or half else nn.ClipGradByGlobalNorm(1.0)  # theirs moves to a GPU
    stepped = [one for one in net.parameters() if form != "v2" or not one.stop_gradient]  # split_param takes no frozen ones
    optimizer = MasterAdamW(scheduler, parameters=stepped, weight_decay=0.1, grad_clip=clip, multi_precision=bool(half))
    made = Training(form, net, *_wrapped(form, net, optimizer), scheduler)
    if half:
        compute_in_float32(net)
    return made


def _wrapped(form: str, net: Any, optimizer: Any) -> tuple[Any, Any]:
    if form in ("2", "3"):
        gloo.allow_group_sharded()
        if form == "3":
            return GroupShardedStage3(net, optimizer=optimizer, device="cpu", segment_size=SEGMENT), optimizer
        optimizer = GroupShardedOptimizerStage2(params=optimizer._parameter_list, optim=optimizer, device="cpu")
        return GroupShardedStage2(net, optimizer, device="cpu"), optimizer
    if form == "plain":
        return net, optimizer
    if form == "v2":  # without main_grad, gradients of a CPU leave the communication buffers at the first clear_grad()
        mix_precision_utils.MixPrecisionLayer(net)
        optimizer = mix_precision_utils.MixPrecisionOptimizer(optimizer)
    return fleet.distributed_model(net), fleet.distributed_optimizer(optimizer)


def _pipeline() -> Any:
    group = fleet.get_hybrid_communicate_group()
    embedding = ("embedding", nn.Embedding)
    layers = [
        SharedLayerDesc(*embedding, None, "weight", VOCABULARY, WIDTH),
        *(LayerDesc(Block, group.get_model_parallel_world_size() > 1) for _ in range(3)),
        SharedLayerDesc(*embedding, tied_head, "weight", VOCABULARY, WIDTH),
    ]
    return PipelineLayer(layers, num_stages=group.get_pipe_parallel_world_size(), topology=group._topo, loss_fn=Loss())


def rows(step: int, replica: int) -> Any:
    """The rows of a replica in a step."""
    made = np.random.RandomState(1000 * step + replica).randint(0, VOCABULARY, (ROWS, 5))
    return paddle.to_tensor(made)


class Held(NamedTuple):
    """A rank's part of a tensor: of which whole shape, and how it continues in that of the next rank: along `axis`, in the
    flat row-major order (with padding at the end), or, with neither, not at all.
    """

    array: np.ndarray
    shape: tuple[int, ...]
    axis: int | None
    flat: bool


def held(one: Training) -> dict[str, Held]:
    """Everything that this rank keeps, by stored group and name, as Paddle has it."""
    found: dict[str, Held] = {}
    inner = one.optimizer
    for name in ("_inner_opt", "_inner_opt", "_optim"):
        inner = vars(inner).get(name, inner)
    for name, parameter in one.net.state_dict(use_hook=False).items():
        part = getattr(parameter, "fw_storage", None)
        part = parameter if part is None else part  # stage 3 leaves a frozen one gathered after a backward pass
        axis = getattr(parameter, "split_axis", None)
        found[f"model/{name}"] = _held(parameter, part, axis)
        owners = (parameter.name, f"slice@{parameter.name}")
        for owner in owners:
            master = inner._master_weights.get(owner)
            if master is not None:
                found[f"master/{name}"] = _held(parameter, master, axis)
                owners = (*owners, master.name)
        for kind, by_owner in inner._accumulators.items():
            kept = next((by_owner[owner] for owner in owners if owner in by_owner), None)
            if kept is not None:
                found[f"optim/{name}/{kind}"] = _held(parameter, kept, axis)
    return found


def _held(parameter: Any, kept: Any, axis: int | None) -> Held:
    array = kept.astype("float32").numpy()
    if kept.shape == parameter.shape:
        return Held(array, tuple(parameter.shape), axis, flat=False)
    if kept.shape == [1]:  # a power of beta
        return Held(array, (1,), None, flat=False)
    return Held(array, tuple(parameter.shape), axis, flat=True)


class RankParts(NamedTuple):
    """What a rank has. It is number `tensor_rank` of those that share a tensor."""

    tensor_rank: int
    held: dict[str, Held]


def parts_of(one: Training) -> RankParts:
    return RankParts(fleet.get_hybrid_communicate_group().get_model_parallel_rank(), held(one))


def whole(parts: list[RankParts]) -> dict[str, np.ndarray]:
    """The whole tensors of which these are the ranks' parts; copies that differ are an error."""
    found = {}
    for name in {name: None for part in parts for name in part.held}:
        by_rank: dict[int, list[Held]] = {}
        for part in parts:
            if name in part.held:
                by_rank.setdefault(part.tensor_rank, []).append(part.held[name])
        joined = [_joined(name, by_rank[rank]) for rank in sorted(by_rank)]
        axis = by_rank[min(by_rank)][0].axis
        cut = axis is not None and len(joined) > 1
        found[name] = np.concatenate(joined, axis) if cut else _equal(name, joined)
    return found


def _joined(name: str, of: list[Held]) -> np.ndarray:
    """What ranks have that share no tensor otherwise than by its elements."""
    if not of[0].flat:
        return _equal(name, [one.array for one in of])
    return np.concatenate([one.array for one in of])[: int(np.prod(of[0].shape))].reshape(of[0].shape)


def _equal(name: str, arrays: list[np.ndarray]) -> np.ndarray:
    assert all(np.array_equal(array, arrays[0]) for array in arrays), f"{name} differs between ranks"
    return arrays[0]
