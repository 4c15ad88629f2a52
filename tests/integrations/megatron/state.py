"""Everything that trains, as tensors by name: what a restored run must have in common with the one that saved."""

from __future__ import annotations

from typing import Any

import torch

from tests.integrations.megatron.training import Training


def tensors(made: Training) -> dict[str, torch.Tensor]:
    """Every parameter and buffer of this rank, every tensor of the optimizers, and the streams, by Megatron's own names."""
    from megatron.core import tensor_parallel

    found: dict[str, torch.Tensor] = {"streams.torch": torch.get_rng_state()}
    for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items():
        found[f"streams.{name}"] = state
    for number, chunk in enumerate(made.model):
        found |= {f"{number}.{name}": value for name, value in chunk.state_dict().items() if torch.is_tensor(value)}
    for number, inner in enumerate(optimizers(made.optimizer)):
        for place, group in enumerate(inner.param_groups):
            found[f"optim.{number}.{place}.lr"] = torch.tensor(group["lr"], dtype=torch.float64)
            for index, parameter in enumerate(group["params"]):
                found[f"optim.{number}.{place}.{index}"] = parameter
                for key, value in inner.state[parameter].items():
                    found[f"optim.{number}.{place}.{index}.{key}"] = value
    scale = made.optimizer.get_loss_scale()
    return {**found, "scale": scale}


def optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The torch optimizers inside."""
    chained = getattr(optimizer, "chained_optimizers", None)
    return [one for inner in chained for one in optimizers(inner)] if chained is not None else [optimizer.optimizer]
