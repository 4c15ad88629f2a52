"""Run by torchrun on four ranks: every box against `full_tensor()`, all boxes tile, and the state on top of them."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _utils, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from holdfast.state.train_state import Snapshot, TrainState
from holdfast.tensors.live_pieces import LivePiece, pieces
from holdfast_formats.errors import InvalidRequest, StateMismatch
from tests.client.checkpoint_in_memory import Checkpoint
from tests.tiling import tiles
from tests.torchruns import leave

# Before that was there, torch split nothing unevenly into strided shards, and refused tensor parallelism inside of FSDP2.
SPLITS_UNEVEN = hasattr(_utils, "_compute_local_shape_and_global_offset")
WIDTH, HIDDEN = (5, 7) if SPLITS_UNEVEN else (8, 12)  # the first two do not divide by two: every dimension is uneven
KINDS = ("fsdp × tp", "hsdp", "fsdp", "plain")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.ones(1))  # fewer rows than ranks: empty shards


def check(tensor: torch.Tensor, name: str) -> None:
    """This rank's pieces are the full tensor's boxes; the boxes of all ranks tile it."""
    placed = pieces(tensor, name)
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    assert placed.shape == tuple(full.shape), name
    for piece in placed.pieces:
        assert tuple(piece.tensor.shape) == piece.box.shape, name
        assert torch.equal(full[piece.box.slices], piece.tensor), (name, piece.box)
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [piece.box for piece in placed.pieces])
    assert tiles(list({box for boxes in gathered for box in boxes}), placed.shape), (name, gathered)


def check_distributed() -> None:
    """Tensors distributed by torch, with all kinds of placements, in a mesh of one and of two dimensions."""
    line = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for shape in ((7, 5), (3, 2), (1, 1), (8, 4), (0, 3), (5,)):
        tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
        for placement in (Shard(0), Shard(len(shape) - 1), Replicate()):
            check(distribute_tensor(tensor, line, [placement]), f"line {shape} {placement}")
        for first in (Shard(0), Replicate(), _StridedShard(0, split_factor=2)):
            for second in (Shard(0), Shard(len(shape) - 1), Replicate()):
                if isinstance(first, _StridedShard) and (second != Shard(0) or (shape[0] % 4 and not SPLITS_UNEVEN)):
                    continue
                check(_distributed(tensor, grid, (first, second)), f"grid {shape} {first} {second}")
    assert pieces(distribute_tensor(torch.ones(4), grid, [Replicate(), Shard(0)]), "w").mesh == {"dp": 2, "tp": 2}
    partial = DTensor.from_local(torch.ones(2), line, [Partial()], run_check=False)
    try:
        pieces(partial, "grad.w")
    except InvalidRequest as error:
        assert "'grad.w'" in str(error) and "Partial" in str(error)
    else:
        raise AssertionError("a partial tensor was taken")
    odd = DTensor.from_local(torch.ones(2), line, [Shard(0)], run_check=False, shape=torch.Size((9,)), stride=(1,))
    for name in ("layers.0.w", "layers.1.w"):
        try:
            pieces(odd, name)
        except StateMismatch as error:
            assert f"'{name}'" in str(error) and "length of 2 in dimension 0 of 9 does not fit" in str(error)
        else:
            raise AssertionError("a local tensor that does not fit was taken")


def _distributed(tensor: torch.Tensor, mesh, placements) -> DTensor:
    """torch distributes into strided shards only by hand: each rank picks the indices of its place."""
    if not isinstance(placements[0], _StridedShard):
        return distribute_tensor(tensor, mesh, placements)
    local = tensor
    for dimension, placement in enumerate(placements):
        parts, _ = placement._split_tensor(local, mesh.size(dimension), with_padding=False)
        local = parts[mesh.get_coordinate()[dimension]]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def parallel(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model in one kind of parallelism, and an optimizer that has stepped once."""
    torch.manual_seed(7)
    model: nn.Module = nn.Sequential(Block(), Block())
    if kind == "fsdp × tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for block in model:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    elif kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() + 1  # torch's tensor parallelism cannot run uneven layers forward
    optimizer.step()
    for parameter in model.parameters():
        keep_like_custom_optimizers(parameter, optimizer.state[parameter])
    return model, optimizer


def keep_like_custom_optimizers(parameter: torch.Tensor, state: dict) -> None:
    """State as optimizers keep it that work on local shards, or on the mesh with shapes of their own."""
    value = torch.arange(3.0) + parameter.dim()
    if isinstance(parameter, DTensor):
        state["local"] = parameter.to_local().detach() * 2
        mesh = parameter.device_mesh
        state["row"] = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    else:
        state["local"], state["row"] = parameter.detach() * 2, value


def gathered_checkpoint(state: dict) -> Checkpoint:
    """Every rank's snapshot put together, the same on every rank."""
    snapshot = TrainState(state, dist.get_rank(), dist.get_world_size()).snapshot()
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, with_pieces(snapshot, lambda tensor: tensor.contiguous().numpy()))
    return Checkpoint(*(with_pieces(each, torch.from_numpy) for each in gathered))


def with_pieces(snapshot: Snapshot, convert) -> Snapshot:
    """The snapshot with other memory: numpy travels between ranks in every dtype, tensors do not."""
    leaves = []
    for leaf in snapshot.leaves:
        leaves.append(leaf._replace(pieces=tuple(LivePiece(box, convert(tensor)) for box, tensor in leaf.pieces)))
    return snapshot._replace(leaves=tuple(leaves))


def check_state(kind: str) -> None:
    """Parameters and optimizer state are where torch says; a fresh state of another kind takes them over exactly."""
    model, optimizer = parallel(kind)
    for name, parameter in model.named_parameters():
        check(parameter, f"{kind} {name}")
        for key, value in optimizer.state[parameter].items():
            if key != "local":
                check(value, f"{kind} {name}/{key}")
    checkpoint = gathered_checkpoint({"model": model, "optim": optimizer})
    for other in KINDS if kind == KINDS[0] else (kind, KINDS[0]):
        target = fresh(other)
        restoration = TrainState(target, dist.get_rank(), dist.get_world_size()).prepare(checkpoint.stored(dist.get_rank()))
        assert not restoration.missing and not restoration.unexpected
        checkpoint.fill(restoration)
        restoration.apply()
        again = gathered_checkpoint(target)
        assert again.tensors.keys() == checkpoint.tensors.keys()
        assert all(torch.equal(tensor, checkpoint.tensors[key]) for key, tensor in again.tensors.items()), (kind, other)
        if kind == other:
            check_types(model, optimizer, target)


def check_types(model: nn.Module, optimizer: torch.optim.Optimizer, target: dict) -> None:
    """State that was made anew is of the kind the optimizer itself had made, in the same placement."""
    for a, b in zip(model.parameters(), target["model"].parameters(), strict=True):
        for key, value in optimizer.state[a].items():
            made = target["optim"].state[b][key]
            assert type(made) is type(value) and made.shape == value.shape and made.dtype == value.dtype, key
            assert getattr(made, "placements", None) == getattr(value, "placements", None), key


def fresh(kind: str) -> dict:
    """The same objects as `parallel` gives, with other values and an optimizer that never stepped."""
    model, _ = parallel(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.5)}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    check_distributed()
    for kind in KINDS:
        check_state(kind)
    leave()


if __name__ == "__main__":
    main()
