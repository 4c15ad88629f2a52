"""One training of PaddleFormers, saved by Holdfast and by what PaddleFormers' Trainer calls itself.

    python -m benchmarks.paddle_trainers DIRECTORY

In an environment with paddlepaddle and paddleformers, on a CPU, in one process. PaddleFormers writes a unified checkpoint of
one process itself, also with `async_save`, and syncs nothing: what it wrote is synced here, and that is its time until
durable. A restore has its files in the page cache; Holdfast's reads files too, those of a run that no daemon holds.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import paddle
from paddle.distributed import fleet
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight
from paddleformers.trainer.unified_checkpoint.unified_checkpoint import UnifiedCheckpointHandler
from paddleformers.transformers import LlamaConfig, LlamaForCausalLM

from holdfast.integrations import paddle as holdfast_paddle
from holdfast_formats.naming import step_directory

SIZES = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 8}
LAYERS, WORDS, REPEATS = 33, 4096, 3  # 300 tensors


class Measured(NamedTuple):
    """Seconds until the trainer goes on, until the checkpoint is durable, and of a restore; and bytes."""

    stall_s: float
    durable_s: float
    resume_s: float
    bytes: int


def training() -> tuple[Any, Any]:
    config = LlamaConfig(**SIZES, num_hidden_layers=LAYERS, vocab_size=WORDS, max_position_embeddings=64)
    config.fuse_rms_norm = False
    model = LlamaForCausalLM(config)
    optimizer = paddle.optimizer.AdamW(1e-4, parameters=model.parameters())
    loss = model(input_ids=paddle.randint(1, WORDS, [1, 8]))[0].mean()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    return model, optimizer


def seconds(act: Callable[[], Any]) -> float:
    begun = time.monotonic()
    act()
    return time.monotonic() - begun


def size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file() and not path.is_symlink())


def synced(directory: Path) -> None:
    for path in directory.rglob("*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def by_holdfast(model: Any, optimizer: Any, directory: Path) -> list[Measured]:
    found = []
    with holdfast_paddle.attach(model, optimizer, "run", at=directory) as attached:
        attached.save(1, wait="durable")  # makes the memory
        for step in range(2, 2 + REPEATS):
            begun = time.monotonic()
            ticket = attached.save(step)
            stall = time.monotonic() - begun
            ticket.result()
            found.append(
                Measured(
                    stall, time.monotonic() - begun, 0.0, size(directory / "run" / "checkpoints" / step_directory(step))
                )
            )
    with holdfast_paddle.attach(model, optimizer, "run", at=directory) as attached:
        resumed = seconds(attached.restore)
    return [one._replace(resume_s=resumed) for one in found]


def by_paddle(save: Callable[[Path], None], load: Callable[[Path], None], directory: Path) -> list[Measured]:
    found = []
    for step in range(REPEATS):
        at = directory / str(step)
        begun = time.monotonic()
        save(at)
        stall = time.monotonic() - begun
        synced(at)
        durable = time.monotonic() - begun
        found.append(Measured(stall, durable, seconds(lambda at=at: load(at)), size(at)))  # type: ignore[misc]
    return found


def unified(model: Any, optimizer: Any, directory: Path) -> list[Measured]:
    arguments = SimpleNamespace(
        unified_checkpoint_config=["async_save"],
        should_save=True,
        ignore_save_lr_and_optim=False,
        ckpt_quant_stage="O0",
        fp16=False,
        bf16=False,
        dataset_rank=0,
        use_expert_parallel=False,
    )
    handler = UnifiedCheckpointHandler(arguments)

    def save(at: Path) -> None:
        at.mkdir(parents=True)
        handler.save_unified_checkpoint(model, optimizer, str(at), str(at))
        handler.save_unified_optimizer(model, optimizer, str(at), str(at))

    def load(at: Path) -> None:
        handler.load_unified_checkpoint(model, str(at))
        handler.load_unified_optimizer(model, optimizer, str(at))

    return by_paddle(save, load, directory)


def flex(model: Any, optimizer: Any, directory: Path) -> list[Measured]:
    def parts() -> dict[str, Any]:
        weights = model.sharded_state_dict()
        state = optimizer.sharded_state_dict(weights)
        for one in weights.values():
            if isinstance(one, ShardedWeight):
                one.local_tensor = paddle.Tensor(one.local_tensor)
        return {"model_state": weights, "optimizer_state": state}

    def save(at: Path) -> None:
        for name, state in parts().items():
            (at / name).mkdir(parents=True)
            paddle.distributed.save_state_dict(state, str(at / name))

    def load(at: Path) -> None:
        for name, state in parts().items():
            paddle.distributed.load_state_dict(state, str(at / name))

    return by_paddle(save, load, directory)


def main() -> None:
    paddle.set_device("cpu")
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 1, "sharding_degree": 1}
    fleet.init(is_collective=True, strategy=strategy)
    model, optimizer = training()
    print(f"{len(list(model.parameters()))} tensors")
    print("| | stall (s) | durable (s) | restore (s) | bytes (MiB) |\n|---|---|---|---|---|")
    for name, measure in (("Holdfast", by_holdfast), ("unified_checkpoint", unified), ("flex_checkpoint", flex)):
        directory = Path(sys.argv[1]) / name
        found = measure(model, optimizer, directory)
        median = Measured(*(statistics.median(column) for column in zip(*found, strict=True)))
        times = f"{median.stall_s:.3f} | {median.durable_s:.2f} | {median.resume_s:.2f}"
        print(f"| {name} | {times} | {median.bytes / 2**20:.0f} |")
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
