"""Megatron-core loads an export, and what it was made of, on any number of ranks: both must give the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.integrations.megatron import training


def loaded(made: training.Training, directory: Path) -> dict[str, torch.Tensor]:
    """The model's tensors on this rank, as `dist_checkpointing.load` reads them for the names that the checkpoint states."""
    from megatron.core import dist_checkpointing
    from megatron.core.utils import unwrap_model

    model = unwrap_model(made.model[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    metadata: Any = dist_checkpointing.load_content_metadata(str(directory))
    state = dist_checkpointing.load({"model": model.sharded_state_dict(metadata=metadata)}, str(directory))
    model.load_state_dict(state["model"], strict=True)
    return {name: one.detach().clone() for name, one in model.named_parameters()}


def main() -> None:
    parser = training.parser()
    parser.add_argument("--against", type=Path)
    args = parser.parse_args()
    with training.parallel(args):
        made = training.build(args)
        found = loaded(made, args.work / "release")
        assert not any((one == 7.0).all() for one in found.values())
        for name, one in (loaded(made, args.against) if args.against is not None else {}).items():
            assert torch.equal(found[name], one), name


if __name__ == "__main__":
    main()
