"""Loads a checkpoint in the layout of its arguments, saves it as another run, and says what it has and what a step does."""

from __future__ import annotations

import json
from typing import Any

import torch

from holdfast.integrations.megatron import close, configure, load_checkpoint, save_checkpoint
from tests.integrations.megatron import training
from tests.integrations.recording import digest


def plain(made: training.Training) -> dict[str, str]:
    """Digests of parameters and moments by Megatron's own names, where one rank has all of them and steps them itself."""
    names = {id(parameter): name for chunk in made.model for name, parameter in chunk.module.named_parameters()}
    inner = made.optimizer.chained_optimizers[0].optimizer
    found = {f"model/{name}": digest(value) for chunk in made.model for name, value in chunk.module.named_parameters()}
    for group in inner.param_groups:
        for parameter in group["params"]:
            for key in ("exp_avg", "exp_avg_sq") if id(parameter) in names else ():
                found[f"optim/{names[id(parameter)]}/{key}"] = digest(inner.state[parameter][key])
    return found


def main() -> None:
    parser = training.parser()
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--before", type=int, default=0, help="steps that are made before anything is loaded")
    args = parser.parse_args()
    with training.parallel(args):
        configure(args=args, huggingface=training.huggingface(args))
        made = training.build(args)
        for number in range(1, args.before + 1):
            training.step(made, number)
        iteration, operations = 0, 7.0
        if args.load is not None:
            iteration, operations = load_checkpoint(made.model, made.optimizer, made.scheduler)
        for number in range(iteration + 1, iteration + args.steps + 1):
            training.step(made, number)
        iteration += args.steps
        about: dict[str, Any] = {"iteration": iteration, "operations": operations, "consumed": args.consumed_train_samples}
        about |= {"steps": made.scheduler.num_steps, "lr": made.optimizer.param_groups[0]["lr"]}
        if torch.distributed.get_world_size() == 1 and not args.distributed:
            about["plain"] = plain(made)
        save_checkpoint(iteration, made.model, made.optimizer, made.scheduler, operations).result()
        close()
        loss, about["rows"] = training.step(made, iteration + 1)
        told = torch.tensor([loss], dtype=torch.float64)
        torch.distributed.all_reduce(told)  # the mean over data-parallel ranks; others have equal losses
        about["loss"] = float(told) / torch.distributed.get_world_size()
        if torch.distributed.get_rank() == 0:
            (args.work / "told.json").write_text(json.dumps(about))


if __name__ == "__main__":
    main()
