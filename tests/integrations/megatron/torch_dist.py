"""A rank that trains three steps and saves by Megatron-core's own `dist_checkpointing.save`, in the format torch_dist."""

from __future__ import annotations

import torch

from tests.integrations.megatron import training


def main() -> None:
    parser = training.parser()
    parser.add_argument("--sharding", required=True)
    parser.add_argument("--by-number", action="store_true")
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


if __name__ == "__main__":  # the writer starts processes
    main()
