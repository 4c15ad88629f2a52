"""Ranks that train with DeepSpeed and tensor parallelism, each with its own part of a model, and save."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import distributed, nn

from tests.integrations.deepspeed import engines

WORDS, PADDED, WIDTH, INNER, PARALLEL = 61, 64, 12, 10, 2
INFO = {
    "universal_checkpoint_version": 0.2,
    "tp_replicated_parameter_patterns": [r"norm\..*"],
    "parameter_with_row_parallelism_patterns": [r"second\.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r"gated\.weight"],
    "vocabulary_parameter_patterns": [r"words\.weight"],
    "original_vocab_size": WORDS,
}


class Groups:
    """What DeepSpeed asks of Megatron's `mpu`: consecutive ranks are of one model."""

    def __init__(self) -> None:
        rank, world = distributed.get_rank(), distributed.get_world_size()
        models = [list(range(start, start + PARALLEL)) for start in range(0, world, PARALLEL)]
        copies = [list(range(start, world, PARALLEL)) for start in range(PARALLEL)]
        made = {tuple(ranks): distributed.new_group(ranks) for ranks in (*models, *copies)}
        self._model = made[tuple(next(ranks for ranks in models if rank in ranks))]
        self._data = made[tuple(next(ranks for ranks in copies if rank in ranks))]

    def get_model_parallel_rank(self) -> int:
        return distributed.get_rank(self._model)

    def get_model_parallel_world_size(self) -> int:
        return PARALLEL

    def get_model_parallel_group(self) -> Any:
        return self._model

    def get_data_parallel_rank(self) -> int:
        return distributed.get_rank(self._data)

    def get_data_parallel_world_size(self) -> int:
        return distributed.get_world_size() // PARALLEL

    def get_data_parallel_group(self) -> Any:
        return self._data


class Part(nn.Module):
    """A rank's part; the norm is the same on all of them."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(WIDTH)
        torch.manual_seed(rank)
        self.words = nn.Embedding(PADDED // PARALLEL, WIDTH)
        self.gated = nn.Linear(WIDTH, 2 * INNER // PARALLEL)
        self.second = nn.Linear(INNER // PARALLEL, WIDTH, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.words(rows)
        gate, up = self.gated(hidden).chunk(2, -1)
        same = torch.arange(WIDTH, dtype=hidden.dtype).expand(2, WIDTH)
        return self.second(torch.relu(gate) * up).float().square().mean() + self.norm(same).float().logsumexp(-1).mean()


def main(directory: str, stage: str, kind: str) -> None:
    import deepspeed
    from deepspeed import comm
    from deepspeed.ops import __compatible_ops__ as compatible_ops

    compatible_ops["deepspeed_shm_comm"] = False  # a minute of compiling
    deepspeed.init_distributed("gloo", verbose=False)
    groups = Groups()
    chosen = engines.config(int(stage), kind)
    part = Part(groups.get_model_parallel_rank())
    engine, *_ = deepspeed.initialize(model=part, model_parameters=part.parameters(), config=chosen, mpu=groups)
    for step in range(3):
        torch.manual_seed(step)
        engines.step(engine, torch.randint(PADDED // PARALLEL, (4, 3)))
    engine.save_checkpoint(directory, client_state={"universal_checkpoint_info": INFO})
    comm.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
