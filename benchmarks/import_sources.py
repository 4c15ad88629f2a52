"""What `benchmarks.imports` imports: checkpoints of a size, as other programs write them.

`python -m benchmarks.import_sources KIND DIRECTORY BYTES` writes one, in a process whose memory is not measured.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file

from holdfast_formats.region import Box

WIDTH, ROWS = 4096, 4096
TENSOR_BYTES = 4 * WIDTH * ROWS
FILE_TENSORS = 16
RANKS = 2
Array = NDArray[Any]


def drawn(size: int, parts: int = 1) -> Iterator[tuple[int, list[Array]]]:
    """Layers of so many bytes together, each in so many arrays of random bits."""
    rng = np.random.default_rng(1)
    for number in range(max(size // TENSOR_BYTES // parts, 1)):
        yield number, [rng.integers(0, 2**32, (ROWS, WIDTH), np.uint32).view(np.float32) for _ in range(parts)]


def name_of(number: int) -> str:
    return f"model.layers.{number}.mlp.up_proj.weight"


def model(size: int) -> dict[str, torch.Tensor]:
    return {name_of(number): torch.from_numpy(array) for number, (array,) in drawn(size)}


def training(size: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A model and the state of its AdamW, by numbers."""
    weights, state = dict[str, torch.Tensor](), dict[int, Any]()
    for number, arrays in drawn(size, 3):
        weights[name_of(number)], first, second = map(torch.from_numpy, arrays)
        state[number] = {"step": torch.tensor(3.0), "exp_avg": first, "exp_avg_sq": second}
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "params": list(state)}
    return weights, {"state": state, "param_groups": [group]}


def safetensors(directory: Path, size: int) -> None:
    """Numbered files of tensors of two types, which stand at odd places."""
    (directory / "config.json").write_text("{}")
    held, files, waiting = dict[str, Array](), max(-(-size // TENSOR_BYTES // FILE_TENSORS), 1), 1
    count = max(size // TENSOR_BYTES, 1)
    for number, (array,) in drawn(size):
        held[f"layers.{number}.weight"] = array.view(np.float16) if "1" in str(number) else array
        if len(held) == FILE_TENSORS or number == count - 1:
            save_file(held, directory / f"model-{waiting:05}-of-{files:05}.safetensors", metadata={"format": "pt"})
            held, waiting = {}, waiting + 1


def torch_file(directory: Path, size: int) -> None:
    """A model with its AdamW in one file."""
    weights, optimizer = training(size)
    torch.save({"model": weights, "optimizer": optimizer, "step": 3}, directory / "train.pt")


def torch_old_file(directory: Path, size: int) -> None:
    """A model in the form of torch before 1.6."""
    torch.save(model(size), directory / "model.pt", _use_new_zipfile_serialization=False)


def _dcp(directory: Path, size: int, dim: int) -> None:
    saving = importlib.import_module("tests.wings.convert.foreign.dcp.saving")
    cut = [[ROWS, WIDTH][dim] // RANKS if d == dim else [ROWS, WIDTH][d] for d in range(2)]
    tensors = model(size)
    states = []
    for rank in range(RANKS):
        box = Box(tuple(rank * cut[d] if d == dim else 0 for d in range(2)), tuple(cut))
        states.append({f"model.{name}": saving.Sharded(tensor, [box]) for name, tensor in tensors.items()})
    saving.save_ranks(directory, states)


def dcp_rows(directory: Path, size: int) -> None:
    """Of ranks that hold rows, as FSDP's."""
    _dcp(directory, size, 0)


def dcp_columns(directory: Path, size: int) -> None:
    """Of ranks that hold columns, as of tensor parallel layers."""
    _dcp(directory, size, 1)


def megatron_ranks(directory: Path, size: int) -> None:
    """By rank, cut by rows and by columns."""
    (directory / "latest_checkpointed_iteration.txt").write_text("20")
    weights = [array for array in model(size).values()]
    for rank in range(RANKS):
        arguments = argparse.Namespace(
            swiglu=False, tensor_model_parallel_size=RANKS, pipeline_model_parallel_size=1, num_layers=len(weights) // 2
        )
        own = {}
        for number, array in enumerate(weights):
            part, dim = (("linear_fc1", 0), ("linear_fc2", 1))[number % 2]
            own[f"decoder.layers.{number // 2}.mlp.{part}.weight"] = array.chunk(RANKS, dim)[rank].clone()
        place = directory / "iter_0000020" / f"mp_rank_{rank:02}"
        place.mkdir(parents=True)
        value = {"args": arguments, "checkpoint_version": 3.0, "iteration": 20, "model": own}
        torch.save(value, place / "model_optim_rng.pt")


def gguf(directory: Path, size: int) -> None:
    """A Llama whose attention's rows are interleaved."""
    files = importlib.import_module("tests.wings.convert.foreign.gguf.files")
    arrays = {}
    for number, (array,) in drawn(size):
        arrays[f"blk.{number // 2}.{('attn_q', 'ffn_up')[number % 2]}.weight"] = array
    heads = {f"llama.attention.head_count{key}": files.Unsigned(32) for key in ("", "_kv")}
    (directory / "model.gguf").write_bytes(files.encoded({**files.LLAMA, **heads}, arrays))


def paddle_unified(directory: Path, size: int) -> None:
    """Weights, masters and moments, which Paddle holds transposed."""
    written = importlib.import_module("tests.wings.convert.foreign.paddle.written")
    written.config(directory)
    written.trainer_state(directory)
    weights, masters, optimizer = dict[str, Array](), dict[str, Array](), dict[str, Array]()
    for number, (weight, *rest) in drawn(size, 3):
        name = name_of(number)
        weights[name] = weight
        masters[name] = weight.T
        optimizer |= {f"{name}/moment{kind}_0": one for kind, one in enumerate(rest, 1)}
        optimizer |= {f"{name}/{kind}": written.power(kind) for kind in written.BETAS}
    written.write_set(directory, "model", [weights], "pt")
    written.write_set(directory, "optimizer", [optimizer], master_weights=False)


def orbax(directory: Path, size: int) -> None:
    """By Orbax itself: an OCDBT database of compressed chunks."""
    checkpoint = importlib.import_module("orbax.checkpoint")
    tree = {"params": {f"layer{number}": {"kernel": array} for number, (array,) in drawn(size)}}
    directory.rmdir()
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory, tree)


def deepspeed_zero(directory: Path, size: int) -> None:
    """Of ranks with ZeRO-2: flat partitions of masters and moments, and the weights in BF16."""
    share = size // 14  # 2 bytes of a weight, 12 of its master and moments
    count = max(share // (ROWS * WIDTH), 1)
    place = directory / "global_step3"
    place.mkdir()
    (directory / "latest").write_text("global_step3")
    names = [name_of(number) for number in range(count)]
    shapes = [{name: torch.Size([ROWS, WIDTH]) for name in names}]
    weights = {name: torch.randint(-(2**15), 2**15, (ROWS, WIDTH), dtype=torch.int16).view(torch.bfloat16) for name in names}
    facts = json.loads('{"lr_scheduler": null, "global_steps": 3, "dp_world_size": 2, "mp_world_size": 1}')
    held: dict[str, Any] = {
        "module": weights,
        "param_shapes": shapes,
        "buffer_names": [],
        "ds_version": "0.19.8",
        "shared_params": {},
    }
    held |= {"frozen_param_shapes": None, "frozen_param_fragments": None, "optimizer": None, **facts}
    held |= {"ds_config": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}}
    torch.save(held, place / "mp_rank_00_model_states.pt")
    flat = count * ROWS * WIDTH // RANKS
    for rank in range(RANKS):
        parts = [torch.randint(0, 2**31, (flat,), dtype=torch.int32).view(torch.float32) for _ in range(3)]
        state = {"step": torch.tensor(3.0), "exp_avg": parts[1], "exp_avg_sq": parts[2]}
        group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "params": [0]}
        states = {"zero_stage": 2, "partition_count": [RANKS], "group_paddings": [0], "clip_grad": 1.0}
        states |= {"base_optimizer_state": {"state": {0: state}, "param_groups": [group]}}
        states |= {"single_partition_of_fp32_groups": [parts[0]], "overflow": False, "param_slice_mappings": None}
        torch.save(
            {"optimizer_state_dict": states, "ds_config": held["ds_config"], "ds_version": "0.19.8"},
            place / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )


MAKERS: dict[str, Callable[[Path, int], None]] = {
    "safetensors": safetensors,
    "torch": torch_file,
    "torch-old": torch_old_file,
    "dcp-rows": dcp_rows,
    "dcp-columns": dcp_columns,
    "megatron-ranks": megatron_ranks,
    "deepspeed-zero2": deepspeed_zero,
    "gguf": gguf,
    "paddle-unified": paddle_unified,
    "orbax": orbax,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=MAKERS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("bytes", type=int)
    given = parser.parse_args()
    given.directory.mkdir()
    MAKERS[given.kind](given.directory, given.bytes)


if __name__ == "__main__":
    main()
