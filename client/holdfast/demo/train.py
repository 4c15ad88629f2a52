"""A small Llama learns Python's standard library, byte by byte. Run it with, for example:

    holdfast serve --root data --socket holdfast.sock
    python -m torch.distributed.run --standalone --nproc-per-node 2 -m holdfast.demo.train \
        --name demo --steps 90 --socket holdfast.sock --directory out

Kill it whenever you like; the same command goes on where the last checkpoint stands. Everything that a training run may
hold is here: bf16 weights sharded by FSDP2, FP32 masters, AdamW, a schedule, an EMA, a data order, dropout. Forward and
backward compute in float32, as bf16 products are very slow on processors that have no instructions for them. `--device cuda`
trains on CUDA devices, one a rank, and computes in bfloat16. The state is the same.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from holdfast import Checkpointer
from holdfast_formats.digest import digest

from .config import local_rank
from .model import WINDOW, build_model, build_tokenizer
from .text import ShuffledWindows, read_text

SEED = 20_260
BATCH = 16  # windows a rank and step
WARMUP_STEPS = 10
EMA_DECAY = 0.98


class Trainer:
    """Model, masters, optimizer, schedule, EMA and data of one rank, and the step that moves them all."""

    def __init__(self, steps: int, device: str = "cpu") -> None:
        self.rank, self.world, self.device = dist.get_rank(), dist.get_world_size(), device
        self.model = build_model(SEED).to(device)
        mesh = init_device_mesh(device, (self.world,), mesh_dim_names=("dp",))
        # The sharded weights stay bf16. FSDP casts what it gathers of them, and gradients back to bf16 after reducing them.
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.model.train()
        self.weights: dict[str, Any] = dict(self.model.named_parameters())
        self.master = {name: weight.detach().float().requires_grad_() for name, weight in self.weights.items()}
        self.ema = {name: master.detach().clone() for name, master in self.master.items()}
        self.optimizer = torch.optim.AdamW(self.master.values(), lr=6e-3, betas=(0.9, 0.95), weight_decay=0.05)
        warmup = LinearLR(self.optimizer, 0.1, total_iters=WARMUP_STEPS)
        cosine = CosineAnnealingLR(self.optimizer, max(steps - WARMUP_STEPS, 1), eta_min=6e-4)
        self.scheduler = SequentialLR(self.optimizer, [warmup, cosine], [WARMUP_STEPS])
        self.loader = ShuffledWindows(read_text(), WINDOW, BATCH, SEED)
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(SEED + 1 + self.rank)

    def state(self) -> dict[str, Any]:
        """The checkpoint's state; generators of python, numpy and torch are saved automatically."""
        return {
            "model": self.model,
            "master": self.master,
            "optim": self.optimizer,
            "scheduler": self.scheduler,
            "ema": self.ema,
            "loader": self.loader,
        }

    def step(self) -> float:
        """Train on the next batch; returns this rank's loss."""
        inputs, targets = (torch.from_numpy(part).to(self.device) for part in self.loader.next_batch(self.rank, self.world))
        loss = self.model(input_ids=inputs, labels=targets).loss
        loss.backward()
        for name, weight in self.weights.items():
            self.master[name].grad = weight.grad.float()
            weight.grad = None
        self.optimizer.step()
        self.scheduler.step()
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(self.master[name])
                self.ema[name].lerp_(self.master[name], 1 - EMA_DECAY)
        return float(loss.item())

    def say(self, text: str) -> None:
        """Print a line, once for all ranks."""
        if self.rank == 0:
            print(text, flush=True)

    def digests(self) -> dict[str, str]:
        """A digest of every entry of this rank's state, to compare two runs bit by bit."""
        tensors: dict[str, torch.Tensor] = {"rng/torch": torch.get_rng_state()}
        if self.device == "cuda":
            tensors["rng/torch/cuda"] = torch.cuda.get_rng_state()
        for group, held in (("model", self.weights), ("master", self.master), ("ema", self.ema)):
            tensors |= {f"{group}/{name}": tensor for name, tensor in held.items()}
        for name, master in self.master.items():
            tensors |= {f"optim/{name}/{key}": value for key, value in self.optimizer.state[master].items()}
        values = {
            "optim/param_groups": [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups],
            "scheduler/state": self.scheduler.state_dict(),
            "loader/state": self.loader.state_dict(),
            "rng/python": random.getstate(),
            "rng/numpy": [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
        }
        found = {name: digest(raw_bytes(tensor)) for name, tensor in tensors.items()}
        return found | {name: digest(json.dumps(value, sort_keys=True).encode()) for name, value in values.items()}

    def whole_weights(self) -> dict[str, str]:
        """A digest of every whole weight, gathered from all ranks, to compare with Transformers."""
        return {name: digest(raw_bytes(weight.full_tensor())) for name, weight in self.weights.items()}


def raw_bytes(tensor: torch.Tensor) -> np.ndarray:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def train(checkpointer: Checkpointer, trainer: Trainer, options: argparse.Namespace) -> None:
    """The loop, which SIGTERM ends after a save. Records are appended to `rank-N.jsonl`, a line at a time: a kill loses
    nothing.
    """
    checkpointer.on_preemption()
    with open(options.directory / f"rank-{trainer.rank}.jsonl", "a", buffering=1) as journal:
        restored = checkpointer.restore()
        journal.write(json.dumps({"restored": restored}) + "\n")
        trainer.say(f"continues after step {restored}" if restored else "starts with step 1")
        ticket = None
        for step in range(restored + 1, options.steps + 1):
            loss = trainer.step()
            journal.write(json.dumps({"step": step, "loss": loss.hex()}) + "\n")
            if step % options.save_every == 0 or step == options.steps:
                ticket = checkpointer.save(step, metrics={"loss": loss})
                trainer.say(f"step {step} loss {loss:.4f}")
            if ticket is not None and ticket.staged:
                journal.write(json.dumps({"staged": ticket.step}) + "\n")
                ticket = None
            if checkpointer.should_stop(step):
                trainer.say(f"stops: step {step} is saved")
                break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="demo", help="name of the run; checkpoints go to ROOT/RUN")
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--save-every", type=int, default=15, metavar="STEPS")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="with cuda, one device per rank")
    parser.add_argument("--socket", type=Path, help="the daemon's unix socket")
    parser.add_argument("--directory", type=Path, default=Path("."), help="where losses and digests are written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if options.device == "cuda":
        prepare_cuda()
    else:
        dist.init_process_group("gloo")
    trainer = Trainer(options.steps, options.device)
    assets = [trainer.model.config, build_tokenizer()]
    with Checkpointer(options.name, trainer.state(), at=options.socket, assets=assets) as checkpointer:
        train(checkpointer, trainer, options)
    report = {"rank": trainer.rank, "state": trainer.digests(), "weights": trainer.whole_weights()}
    (options.directory / f"digests-{trainer.rank}.json").write_text(json.dumps(report, indent=1))
    dist.destroy_process_group()
    leave()


def prepare_cuda() -> None:
    """This rank's device, NCCL beside gloo, and attention by the deterministic kernel."""
    torch.cuda.set_device(local_rank())
    for kernel in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(False)
    dist.init_process_group("cpu:gloo,cuda:nccl")


def leave() -> None:
    """Exit at once: all is written, and gloo's threads sometimes abort during interpreter shutdown.

    Seen with torch 2.13 in about one of 40 exits of a busy machine: "terminate called without an active exception".
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
