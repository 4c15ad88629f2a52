"""A rank that trains three steps and saves by Megatron-core's own `dist_checkpointing.save`, in the format torch_dist."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.integrations.megatron import training


def main() -> None:
    parser = training.parser()
    parser.add_argument("--sharding", required=True)
    parser.add_argument("--by-number", action="store_true")
    parser.add_argument("--ranks", type=Path)
    args = parser.parse_args()
    with training.parallel(args):
        from megatron.core import dist_checkpointing, parallel_state
        from megatron.core.utils import unwrap_model

        made = training.build(args)
        for number in range(3):
            training.step(made, number)
        metadata = {
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
            "distrib_optim_sharding_type": args.sharding,
            "chained_optim_avoid_prefix": True,
            "non_homogeneous_layers": args.by_number,
        }
        model = unwrap_model(made.model[0]).sharded_state_dict(metadata=metadata)
        state = {
            "model": model,
            "optimizer": made.optimizer.sharded_state_dict(model, metadata=metadata),
            "iteration": 3,
            "args": args,
            "opt_param_scheduler": made.scheduler.state_dict(),
        }
        args.work.mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        dist_checkpointing.save(state, str(args.work))
        if args.ranks is not None:
            by_rank(made, args.ranks)


def by_rank(made: training.Training, top: Path) -> None:
    """As `save_checkpoint` of Megatron-LM does with `--ckpt-format torch`: each rank that is no replica has a file."""
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    optimizer = made.optimizer.state_dict()
    tensor, stage = (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank())
    piped = parallel_state.get_pipeline_model_parallel_world_size() > 1
    place = top / "iter_0000003" / (f"mp_rank_{tensor:02}_{stage:03}" if piped else f"mp_rank_{tensor:02}")
    place.mkdir(parents=True, exist_ok=True)
    if made.args.distributed:
        made.optimizer.save_parameter_state(str(place / "distrib_optim.pt"))
    if parallel_state.get_data_parallel_rank():
        return
    models = [unwrap_model(one).state_dict_for_save_checkpoint() for one in made.model]
    named = {"model": models[0]} if len(models) == 1 else {f"model{number}": one for number, one in enumerate(models)}
    value = {"args": made.args, "checkpoint_version": 3.0, "iteration": 3, **named, "optimizer": optimizer}
    torch.save(value, place / "model_optim_rng.pt")


if __name__ == "__main__":  # the writer starts processes
    main()
