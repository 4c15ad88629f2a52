"""A script that does with verl's classes what its trainers do: an actor and a critic under FSDP, saved every few steps, the
data loader's position and the number of the newest step in verl's own files.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler  # verl's choice, too: torch's keeps no generator
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path
from verl.utils.torch_functional import get_cosine_schedule_with_warmup

from holdfast.integrations.verl import install
from tests.integrations.recording import Record
from tests.torchruns import leave

ROLES, ROWS, BATCH, LAST, EVERY, WORDS = ("actor", "critic"), 24, 2, 20, 3, 40


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[int, torch.Tensor]:
        return row, torch.randint(0, WORDS, (6,), generator=torch.Generator().manual_seed(row))


class Worker:
    """A role's worker: what verl's FSDPEngine makes, without what needs a GPU."""

    def __init__(self, role: str, strategy: str, keep: int | None) -> None:
        from verl.workers.engine.fsdp import transformer_impl  # makes its manager by this name

        self.role, self._keep = role, keep
        torch.manual_seed(ROLES.index(role))
        config = Qwen2Config(
            vocab_size=WORDS,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            attention_dropout=0.2,
            tie_word_embeddings=False,
        )
        self.module = sharded(Qwen2ForCausalLM(config), strategy)
        self.module.train()
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.01)
        self.scheduler = get_cosine_schedule_with_warmup(self.optimizer, 2, LAST)
        self.manager = transformer_impl.FSDPCheckpointManager(
            model=self.module,
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            processing_class=None,
            checkpoint_config=CheckpointConfig(),
            trust_remote_code=False,
        )

    def step(self, words: torch.Tensor) -> float:
        loss = self.module(input_ids=words, labels=words).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return float(loss.item())

    def save(self, folder: Path, step: int) -> None:
        self.manager.save_checkpoint(str(folder / self.role), None, step, max_ckpt_to_keep=self._keep)

    def load(self, folder: Path) -> None:
        self.manager.load_checkpoint(str(folder / self.role), del_local_after_load=False)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that is trained, whole."""
        if isinstance(self.module, FullyShardedDataParallel):
            whole = FullyShardedDataParallel.summon_full_params(self.module, writeback=False)
            with whole:
                found = {name: value.detach().clone() for name, value in self.module.named_parameters()}
            local = {f"{name}/{key}": value for name, key, value in self._moments()}
            return {f"{self.role}.{name}": value for name, value in {**found, **local}.items()}
        found = dict(self.module.named_parameters()) | {f"{name}/{key}": value for name, key, value in self._moments()}
        return {
            f"{self.role}.{name}": value.full_tensor() if hasattr(value, "full_tensor") else value
            for name, value in found.items()
        }

    def _moments(self) -> list[tuple[str, str, torch.Tensor]]:
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        return [
            (names[parameter], key, value)
            for parameter, state in self.optimizer.state.items()
            for key, value in state.items()
        ]


def sharded(module: nn.Module, strategy: str) -> nn.Module:
    """Wrapped as verl wraps it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    if strategy == "fsdp":
        return FullyShardedDataParallel(module, device_mesh=mesh, use_orig_params=True, device_id=torch.device("cpu"))
    for layer in module.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # gloo can do no other
    return module


def resume(workers: list[Worker], loader: StatefulDataLoader, folder: Path) -> int:
    """As verl's RayPPOTrainer._load_checkpoint."""
    found = find_latest_ckpt_path(str(folder))
    if found is None:
        return 0
    for worker in workers:
        worker.load(Path(found))
    position = Path(found) / f"data_{dist.get_rank()}.pt"
    loader.load_state_dict(torch.load(position, weights_only=False))
    return int(found.split("global_step_")[-1])


def save(workers: list[Worker], loader: StatefulDataLoader, folder: Path, step: int) -> None:
    """As verl's RayPPOTrainer._save_checkpoint."""
    place = folder / f"global_step_{step}"
    for worker in workers:
        worker.save(place, step)
    place.mkdir(parents=True, exist_ok=True)
    torch.save(loader.state_dict(), place / f"data_{dist.get_rank()}.pt")
    dist.barrier()  # there the trainer is one process
    if dist.get_rank() == 0:
        new = folder / "latest.new"
        new.write_text(str(step))
        os.replace(new, folder / "latest_checkpointed_iteration.txt")
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--strategy", default="fsdp2")
    parser.add_argument("--last", type=int, default=LAST)
    parser.add_argument("--keep", type=int, default=2)
    chosen, record = parser.parse_args(), Record()
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    install("run", at=chosen.work / "root")
    workers = [Worker(role, chosen.strategy, chosen.keep or None) for role in ROLES]
    sampler = RandomSampler(Rows(), generator=torch.Generator().manual_seed(5 + dist.get_rank()))
    # a generator of its own: in verl, the loader is in the trainer's process, and the random streams are the workers'
    loader = StatefulDataLoader(Rows(), BATCH, sampler=sampler, generator=torch.Generator())
    torch.manual_seed(50 + dist.get_rank())
    step = resume(workers, loader, chosen.work / "out")
    record.began(step)
    while step < chosen.last:
        for rows, words in loader:
            step += 1
            losses = [worker.step(words) for worker in workers]
            if step % EVERY == 0:
                save(workers, loader, chosen.work / "out", step)
            record.step(step, sum(losses), rows)
            if step == chosen.last:
                break
    tensors = {name: value for worker in workers for name, value in worker.tensors().items()}
    record.ended(tensors, [worker.scheduler.state_dict()["last_epoch"] for worker in workers])
    for worker in workers:
        worker.manager.close()
    leave()


if __name__ == "__main__":
    main()
