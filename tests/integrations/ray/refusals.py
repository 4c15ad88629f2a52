"""A program whose workers do what must be refused; it prints what was raised, a line each."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from holdfast import Checkpointer
from holdfast.integrations import ray as holdfast_ray
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError


def refused(name: str, act: Callable[[], object], out: Path) -> None:
    """Write down what a call raises."""
    try:
        act()
        said = "nothing"
    except CheckpointError as error:
        said = f"{type(error).__name__}: {error.detail}"
    with out.open("a") as file:
        file.write(json.dumps([name, said]) + "\n")


def make_unremovable(left: Path, root: Path) -> None:
    """What a killed worker left behind, with a directory where its pointer would be."""
    (left / holdfast_ray.POINTER).mkdir(parents=True)
    (left / naming.step_directory(9)).symlink_to(root / naming.checkpoint_path("run", 9))


def one(config: dict[str, Any]) -> None:
    work, out = Path(config["work"]), Path(config["work"], "said.jsonl")
    state = {"w": torch.zeros(4)}
    with Checkpointer("drops", state, at=work / "root") as checkpointer:
        refused("policy", lambda: holdfast_ray.report(checkpointer, 1, {}), out)
    with Checkpointer("here", state, policy="wait") as checkpointer:  # ./holdfast-data
        refused("temporary", lambda: holdfast_ray.report(checkpointer, 1, {}), out)
    with tempfile.TemporaryDirectory() as directory:
        foreign = ray.train.Checkpoint.from_directory(directory)
        refused("foreign", lambda: holdfast_ray.step(foreign, "run"), out)
    with Checkpointer("run", state, at=work / "root", policy="wait") as checkpointer:
        make_unremovable(Path(config["unremovable"]), Path(str(checkpointer.root())))
        holdfast_ray.report(checkpointer, 1, {"loss": 0.5, "note": "text", "nan": float("nan")}).result()
        holdfast_ray.report(checkpointer, 2, {"loss": 0.4}, assets={"note.txt": "kept"}).result()


def two(config: dict[str, Any]) -> None:
    """Without torch.distributed, two workers are two worlds."""
    if ray.train.get_context().get_world_rank() == 0:
        out = Path(config["work"], "said.jsonl")
        with Checkpointer("world", {"w": torch.zeros(4)}, at=config["work"] + "/root", policy="wait") as checkpointer:
            refused("world", lambda: holdfast_ray.report(checkpointer, 1, {}), out)


def main() -> None:
    work = Path(sys.argv[1]).absolute()
    out = work / "said.jsonl"
    with Checkpointer("outside", {"w": torch.zeros(4)}, at=work / "root", policy="wait") as checkpointer:
        refused("outside", lambda: holdfast_ray.report(checkpointer, 1, {}), out)
    ray.init(num_cpus=2, include_dashboard=False, configure_logging=False)
    stored = ray.train.RunConfig(name="experiment", storage_path=str(work / "ray"))
    left = work / "ray" / "experiment" / f"{naming.step_directory(9)}.dead"
    config = {"work": str(work), "unremovable": str(left)}
    scaling = ray.train.ScalingConfig(num_workers=1)
    result = TorchTrainer(one, train_loop_config=config, scaling_config=scaling, run_config=stored).fit()
    refused("another run", lambda: holdfast_ray.step(result.checkpoint, "other"), out)
    with result.checkpoint.as_directory() as directory, out.open("a") as file:
        file.write(json.dumps(["files", sorted(os.listdir(directory))]) + "\n")
        file.write(json.dumps(["left behind", sorted(os.listdir(left))]) + "\n")
    stored = ray.train.RunConfig(name="second", storage_path=str(work / "ray"))
    scaling = ray.train.ScalingConfig(num_workers=2)
    DataParallelTrainer(two, train_loop_config=config, scaling_config=scaling, run_config=stored).fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
